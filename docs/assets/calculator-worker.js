// Runs calc in Python, in a thread of its own, so that the page never waits.
let loading, browser, broken, newest, size;
let answering = Promise.resolve(); // one question at a time: the page starts another worker after a fault

const say = (words, values) => postMessage({ words, values });
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

// Python, as it stood once calc was loaded when the site was built: its memory comes along, its size first. Pyodide gets
// its WebAssembly ready while the memory fills.
async function start(engine) {
  const packed = fetched(`${engine}snapshot.gz`);
  const loaded = Promise.all([import(`${engine}pyodide.mjs`), import(`${engine}pyodide.asm.mjs`)]);
  const chunks = (await packed).body.pipeThrough(new DecompressionStream("gzip")).getReader();
  const { value: first } = await chunks.read();
  const memory = new Uint8Array(new DataView(first.buffer, first.byteOffset).getUint32(0, true));
  const filled = fill(memory, first.subarray(4), chunks);
  const [{ loadPyodide }, { default: create }] = await loaded;
  const py = await loadPyodide({
    indexURL: engine,
    stdLibURL: `${engine}pyodide-lock.json`, // something small in its place
    _loadSnapshot: memory,
    // Pyodide copies that memory over its own, and does not make room for it.
    async createPyodideModule(settings) {
      const made = await create(settings);
      await filled;
      made._free(made._malloc(memory.byteLength));
      return made;
    },
  });
  // What an answer imports is in memory; of the library's rest nothing is loaded before Python reads it.
  const library = py.FS.readdir("/lib").find((name) => name.endsWith(".zip"));
  py.FS.unlink(`/lib/${library}`);
  py.FS.createLazyFile("/lib", library, `${engine}python_stdlib.zip`, true, false);
  return py.pyimport("calc.site.calculator.browser");
}

// The file that says how much is on its way is one that Pyodide reads anyhow.
async function sayLoading(engine) {
  const { megabytes } = await (size ??= fetched(`${engine}pyodide-lock.json`).then((lock) => lock.json()));
  if (!browser) say("Loading the calculator: Python and the formulas, {megabytes} MB, once …", { megabytes });
}

async function fill(memory, value, chunks) {
  for (let place = 0, done = false; !done; { value, done } = await chunks.read()) {
    memory.set(value, place);
    place += value.length;
  }
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
  try {
    if (!browser) sayLoading(engine).catch((error) => failed(error, question?.id));
    browser ??= await (loading ??= start(engine));
    if (!question) return postMessage({ ready: true });
    await (answering = answering.then(() => question === newest && answer(question)));
  } catch (error) {
    failed(error, question?.id);
  }
};
