// My job died: a pasted text goes to calc in a worker of its own, its answer comes back as HTML.
(() => {
  const box = document.getElementById("diagnose");
  const site = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const form = box.querySelector("form.pasted");
  const area = form.querySelector("textarea");
  const state = form.querySelector(".state");
  const stop = form.querySelector(".stop");
  const shown = box.querySelector(".answer");
  const script = new URL("calculator-worker.js", document.currentScript.src).href;
  const local = location.protocol === "file:";
  const LARGEST = 1_000_000; // characters; the end of a longer log is what tells
  const OFFLINE = "The diagnosis works on the site, not from a folder; the example below works everywhere.";
  const FAILED = {
    loading: "The diagnosis could not be loaded: check the connection and ask again. The example needs nothing.",
    answering:
      "The diagnosis failed at this text, by a fault of its own: shorten it and ask again, or ask " +
      "python -m calc diagnose. The browser's console says what happened, for whoever mends it.",
  };
  let worker, busy = false;
  let snapshot = null; // a memory snapshot that was dropped, as base64

  const absolute = (address) => new URL(address, location.href).href;

  function tell(words, kind = "") {
    state.textContent = words;
    state.className = `state ${kind}`;
  }

  function done() {
    busy = false;
    stop.hidden = true;
    shown.removeAttribute("aria-busy");
  }

  function halt(words, kind) {
    worker?.terminate();
    worker = null;
    done();
    tell(words, kind);
  }

  function running() {
    if (worker) return worker;
    worker = new Worker(script, { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.words) return tell(data.words, "working");
      if (data.ready) return busy || tell("");
      if (data.failed) return halt(FAILED[data.failed], "error");
      done();
      if (data.answer.error) {
        shown.hidden = true;
        return tell(data.answer.error, "error");
      }
      shown.innerHTML = data.answer.html;
      shown.hidden = false;
      tell(data.answer.line);
    };
    worker.onerror = () => halt(FAILED.loading, "error");
    return worker;
  }

  function send(question) {
    if (local) return tell(OFFLINE, "error");
    running().postMessage({ site: { engine: absolute(site.engine), catalog: absolute(site.catalog) }, question });
  }

  function ask(fields) {
    if (local) return tell(OFFLINE, "error");
    if (busy) halt("");
    busy = true;
    stop.hidden = false;
    shown.setAttribute("aria-busy", "true");
    const base64 = snapshot && { base64: snapshot };
    send({ root: site.root, diagnose: area.value.slice(-LARGEST), fields, ...base64 });
  }

  // What the reader changed in the fields; those left as they were read say nothing new.
  function completed(fields) {
    const given = {};
    for (const field of fields.elements) {
      const before = field.options ? [...field.options].find((o) => o.defaultSelected)?.value ?? "" : field.defaultValue;
      if (field.name && field.value.trim() !== "" && field.value !== before) given[field.name] = field.value.trim();
    }
    return given;
  }

  const encoded = (file) =>
    new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });

  let said = {}; // fields completed so far, for as long as the text stays the same

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask((said = {}));
  });
  box.addEventListener("submit", (event) => {
    if (!event.target.matches("form.fields")) return;
    event.preventDefault();
    ask((said = { ...said, ...completed(event.target) }));
  });
  stop.addEventListener("click", () => halt("Stopped."));
  form.querySelector(".clear").addEventListener("click", () => {
    area.value = "";
    snapshot = null;
    area.focus();
  });
  area.addEventListener("focus", () => local || worker || send(null), { once: true });
  area.addEventListener("input", () => (snapshot = null));
  area.addEventListener("paste", () => setTimeout(() => ask((said = {}))));
  area.addEventListener("dragover", (event) => event.preventDefault());
  area.addEventListener("drop", async (event) => {
    const [file] = event.dataTransfer.files;
    if (!file) return;
    event.preventDefault();
    if (file.name.endsWith(".pickle")) {
      snapshot = await encoded(file);
      area.value = `memory snapshot: ${file.name}`;
    } else {
      snapshot = null;
      area.value = await file.slice(-LARGEST).text();
    }
    ask((said = {}));
  });
})();
