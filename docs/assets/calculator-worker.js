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

// Python, as it stood once calc was loaded when the site was built: its memory comes along.
async function start({ engine }) {
  say("Loading the calculator: Python and the formulas, 17 MB, once …");
  const memory = fetched(`${engine}snapshot.gz`)
    .then((r) => new Response(r.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
  const [{ loadPyodide }, { default: create }] = await Promise.all([
    import(`${engine}pyodide.mjs`),
    import(`${engine}pyodide.asm.mjs`),
  ]);
  const py = await loadPyodide({
    indexURL: engine,
    _loadSnapshot: memory,
    // Pyodide copies that memory over its own, and does not make room for it.
    async createPyodideModule(settings) {
      const made = await create(settings);
      made._free(made._malloc((await memory).byteLength));
      return made;
    },
  });
  return py.pyimport("calc.site.calculator.browser");
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
