// Python's memory once calc is loaded and has read the catalog, so that a reader's browser need not do that again.
// Usage: node snapshot.mjs ENGINE ARCHIVE CATALOG OUT    (a folder of Pyodide, two files to read, and the one to write)
// The same sources give the same bytes: clocks stand still here, chance starts from 0, and nothing of this machine gets
// into Python's environment: neither its time zone nor its language, nor the path of this file.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";
import { gzipSync } from "node:zlib";

const [engine, archive, catalog, out] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${engine}/pyodide.mjs`));
process.env.TZ = "UTC";
globalThis.Date = class extends Date {
  constructor(...given) {
    super(...(given.length ? given : [0]));
  }
  static now() {
    return 0;
  }
};
performance.now = () => 0;
process.argv[1] = "snapshot.mjs"; // Python's own name there

const py = await loadPyodide({
  _makeSnapshot: true,
  // without docstrings, and without the columns of each instruction, which only tracebacks show: a fifth of the memory
  env: { HOME: "/", LANG: "C.UTF-8", PYTHONHASHSEED: "0", PYTHONNODEBUGRANGES: "1", PYTHONOPTIMIZE: "2" },
});
for (const [name, text] of Object.entries(JSON.parse(readFileSync(archive, "utf8")))) {
  py.FS.mkdirTree(`/engine/${name.slice(0, name.lastIndexOf("/"))}`);
  py.FS.writeFile(`/engine/${name}`, text);
}
py.FS.writeFile("/engine/catalog.json", readFileSync(catalog));
py.runPython(`
import gc, random, sys
from functools import _lru_cache_wrapper
from pathlib import Path
sys.dont_write_bytecode = True
sys.path.insert(0, "/engine")
from calc.site.calculator import browser
browser.start(Path("/engine/catalog.json").read_text("utf-8"))
for each in gc.get_objects():
    if isinstance(each, BaseException): # a refusal that is kept keeps the frames of its question
        each.__traceback__ = each.__context__ = None
    elif isinstance(each, _lru_cache_wrapper) and each.__module__.startswith("calc.") and each.cache_info().maxsize:
        each.cache_clear() # one with a bound holds what single jobs ask
del each
random.seed(0)
gc.collect()
gc.freeze() # all of this stays, so that the collector need not scan it while a question is answered
`);

// What was freed is full of bytes that mean nothing: all of it is taken, cleared and given back, and packs to nothing.
const { memory, _malloc, _free } = py._module;
const taken = [];
const bytes = new Uint8Array(memory.buffer);
memory.grow = () => {
  throw new RangeError("the memory is not to grow");
};
for (let size = 1 << 23; size >= 16; size = Math.floor(size * 0.8)) {
  for (let place = _malloc(size); place; place = _malloc(size)) {
    bytes.fill(0, place, place + size);
    taken.push(place);
  }
}
taken.forEach((place) => _free(place));
// Its size comes first, so that the browser makes room, and starts Python, while the rest is on its way.
const whole = py.makeMemorySnapshot();
const size = new Uint8Array(Uint32Array.of(whole.byteLength).buffer);
writeFileSync(out, gzipSync(Buffer.concat([size, whole])));
