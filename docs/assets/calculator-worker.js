// Runs calc in Python, in a thread of its own, so that the page never waits.
let loading, browser;

const say = (words) => postMessage({ words });
const failed = (error) => {
  console.error(error); // the page tells the reader in words
  postMessage({ failed: browser ? "answering" : "loading" });
};
// Pyodide's loader keeps to itself that its WebAssembly never came, or came broken, and waits for it.
addEventListener("unhandledrejection", ({ reason }) => failed(reason));
const instantiate = WebAssembly.instantiateStreaming;
WebAssembly.instantiateStreaming = (...source) => {
  const made = instantiate(...source);
  made.catch(failed);
  return made;
};

async function fetched(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${response.status} ${address}`);
  return response;
}

async function start({ engine, catalog }) {
  say("Loading the calculator: Python and the formulas, 7 MB, once …");
  const [{ loadPyodide }, archive, data] = await Promise.all([
    import(`${engine}pyodide.mjs`),
    fetched(`${engine}calc.json`).then((r) => r.json()),
    fetched(catalog).then((r) => r.text()),
  ]);
  const py = await loadPyodide({ indexURL: engine });
  say("Reading the formulas …");
  for (const [name, text] of Object.entries(archive)) {
    py.FS.mkdirTree(`/engine/${name.slice(0, name.lastIndexOf("/"))}`);
    py.FS.writeFile(`/engine/${name}`, text);
  }
  py.runPython("import sys; sys.path.insert(0, '/engine')");
  const browser = py.pyimport("calc.site.calculator.browser");
  browser.start(data);
  return browser;
}

onmessage = async ({ data }) => {
  try {
    browser ??= await (loading ??= start(data.site));
    if (!data.question) return postMessage({ ready: true });
    say("Computing …");
    postMessage({ answer: JSON.parse(browser.answer(JSON.stringify(data.question), say)) });
  } catch (error) {
    failed(error);
  }
};
