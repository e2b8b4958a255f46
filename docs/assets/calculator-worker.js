// Runs calc in Python, in a thread of its own, so that the page never waits.
let python;

const say = (words) => postMessage({ words });

async function fetched(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${response.status} ${address}`);
  return response;
}

async function start({ engine, catalog }) {
  say("Loading the calculator: Python and the formulas, 7 MB, once …");
  const [{ loadPyodide }, archive, data] = await Promise.all([
    import(`${engine}pyodide.mjs`),
    fetched(`${engine}calc.zip`).then((r) => r.arrayBuffer()),
    fetched(catalog).then((r) => r.text()),
  ]);
  const py = await loadPyodide({ indexURL: engine });
  say("Reading the formulas …");
  py.unpackArchive(archive, "zip", { extractDir: "/engine" });
  py.runPython("import sys; sys.path.insert(0, '/engine')");
  const browser = py.pyimport("calc.site.browser");
  browser.start(data);
  return browser;
}

onmessage = async ({ data }) => {
  try {
    python ??= start(data.site);
    const browser = await python;
    if (!data.question) return postMessage({ ready: true });
    say("Computing …");
    postMessage({ answer: JSON.parse(browser.answer(JSON.stringify(data.question), say)) });
  } catch (error) {
    postMessage({ broken: String(error.message ?? error).trim().split("\n").pop() });
  }
};
