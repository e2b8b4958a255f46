// Runs calc in Python, in a thread of its own, so that the page never waits.
let loading, browser, broken, newest;
let answering = Promise.resolve(); // one question at a time: the page starts another worker after a fault

const say = (words) => postMessage({ words });
const turn = () => new Promise((resolve) => setTimeout(resolve)); // what has come meanwhile is read
const failed = (error, id) => {
  broken = error;
  console.error(error); // the page tells the reader in words
  postMessage({ id, failed: browser ? "answering" : "loading" });
};
// Pyodide's loader keeps to itself that its WebAssembly never came, or came broken, and waits for it.
addEventListener("unhandledrejection", ({ reason }) => failed(reason));
const instantiate = WebAssembly.instantiateStreaming;
WebAssembly.instantiateStreaming = (...source) => {
  const made = instantiate(...source);
  made.catch((error) => failed(error));
  return made;
};

async function fetched(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${response.status} ${address}`);
  return response;
}

// Python, as it stood once calc was loaded when the site was built: its memory comes along.
async function start(engine) {
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

// Part by part, until it is whole or another question has come.
async function answer(question) {
  say("Computing …");
  const parts = browser.parts(JSON.stringify(question), say);
  try {
    for (const part of parts) {
      if (part) postMessage({ id: question.id, answer: JSON.parse(part) });
      await turn();
      if (question !== newest) return;
    }
  } finally {
    parts.destroy();
  }
}

onmessage = async ({ data: { engine, question } }) => {
  newest = question ?? newest;
  if (broken) return failed(broken, question?.id);
  if (!browser) say("Loading the calculator: Python and the formulas, 17 MB, once …");
  try {
    browser ??= await (loading ??= start(engine));
    if (!question) return postMessage({ ready: true });
    await (answering = answering.then(() => question === newest && answer(question)));
  } catch (error) {
    failed(error, question?.id);
  }
};
