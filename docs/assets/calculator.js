// The calculator's picker: its fields are the address, its answers come from calc in a worker.
(() => {
  const box = document.getElementById("calculator");
  const site = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const form = box.querySelector("form");
  const state = form.querySelector(".state");
  const shown = box.querySelector(".answer");
  const file = box.querySelector("textarea");
  const stop = form.querySelector(".stop");
  const FIXED = ["model", "task", "gpu", "gpus", "host_memory"]; // whatever the task
  const fields = [...form.elements].filter((field) => field.name);
  const script = new URL("calculator-worker.js", document.currentScript.src).href;

  const words = JSON.parse(document.getElementById("words")?.textContent ?? "{}");
  const t = (said) => words[said] ?? said; // what a page in another language says instead

  // ---- the picker and the address

  const whole = (text) => /^\d{1,15}$/.test(text); // what a number keeps exactly
  const lengths = () => site.defaults[Object.hasOwn(site.defaults, form.task.value) ? form.task.value : "sft"];

  function fill() {
    for (const field of fields) {
      const own = lengths()[field.name];
      if (!FIXED.includes(field.name) && field.name !== "method") field.value = own ?? "";
    }
    relevant();
  }

  function relevant() {
    for (const name of site.numbers) {
      if (!FIXED.includes(name)) form[name].closest("label").hidden = !(name in lengths());
    }
  }

  function set(field, value) {
    if (field.options && ![...field.options].some((option) => option.value === value)) {
      field.add(new Option(value, value)); // calc says what is wrong with it
    }
    if (field.type === "number" && !whole(value)) field.type = "text";
    field.value = value;
  }

  function job() {
    const asked = {};
    for (const { name, value } of fields) {
      if (value.trim() === "" || form[name].closest("label").hidden) continue;
      asked[name] = site.numbers.includes(name) && whole(value) ? Number(value) : value;
    }
    return asked;
  }

  function address() {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(job())) {
      if (FIXED.includes(name) || String(lengths()[name] ?? "") !== String(value)) query.set(name, value);
    }
    return `?${query}#calculator`;
  }

  function restore() {
    const query = new URLSearchParams(location.search);
    const known = fields.filter((field) => query.has(field.name));
    if (!known.length) return relevant();
    if (query.has("task")) set(form.task, query.get("task"));
    fill();
    for (const name of ["gpu", "gpus"]) if (!query.has(name)) form[name].value = "";
    for (const field of known) set(field, query.get(field.name));
    relevant();
    box.querySelector(".picker details").open = known.some((field) => field.closest("details"));
    ask({ job: job() });
  }

  // ---- the worker: one question at a time; of those that come meanwhile only the last is asked

  let worker, busy = false, next = null;
  const FAILED = {
    loading: t("The calculator could not be loaded: check the connection and ask again. The tables below need nothing."),
    answering: t("The calculator failed at this question, by a fault of its own: change a field and ask again, or ask python -m calc. The browser's console says what happened, for whoever mends it."),
  };

  function running() {
    if (worker) return worker;
    worker = new Worker(script, { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.words) return tell(t(data.words), "working");
      if (data.ready) return busy || tell("");
      if (data.failed) worker = worker.terminate(); // nobody knows what it still can do: another one starts
      const asked = busy;
      busy = false;
      if (next) {
        const question = next;
        next = null;
        return ask(question);
      }
      done();
      if (data.failed) return asked ? refused(FAILED[data.failed]) : tell(FAILED[data.failed], "error");
      if (data.answer.error) return refused(data.answer.error);
      shown.innerHTML = data.answer.html;
      shown.hidden = false;
      file.value = data.answer.file;
      tell(data.answer.line);
    };
    worker.onerror = () => halt(FAILED.loading, "error");
    return worker;
  }

  const absolute = (address) => new URL(address, location.href).href;
  const sent = (question) => ({
    site: { engine: absolute(site.engine), catalog: absolute(site.catalog) },
    question: question && { root: site.root, language: document.documentElement.lang, ...question },
  });

  function tell(words, kind = "") {
    state.textContent = words;
    state.className = `state ${kind}`;
  }

  function refused(line) {
    shown.hidden = true;
    tell(line, "error");
  }

  function done() {
    shown.removeAttribute("aria-busy");
    stop.hidden = true;
  }

  function halt(words, kind) {
    worker?.terminate();
    worker = next = null;
    busy = false;
    done();
    tell(words, kind);
  }

  const local = location.protocol === "file:";
  const OFFLINE = t("The calculator works on the site, not from a folder; the tables below work everywhere.");

  function warm() {
    if (local) return tell(OFFLINE, "error");
    if (!worker) running().postMessage(sent(null));
  }

  function ask(question) {
    if (local) return tell(OFFLINE, "error");
    if (busy) return void (next = question);
    busy = true;
    shown.setAttribute("aria-busy", "true");
    stop.hidden = false;
    running().postMessage(sent(question));
  }

  function pick() {
    if (!local) history.replaceState(null, "", address());
    ask({ job: job() });
  }

  // ---- what the reader does

  async function copy(button, text) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = t("Copied");
    } catch {
      button.textContent = t("Not allowed here");
    }
    setTimeout(() => (button.textContent = label), 1500);
  }

  form.addEventListener("focusin", warm, { once: true });
  form.addEventListener("pointerdown", warm, { once: true });
  form.addEventListener("change", (event) => {
    if (event.target === form.task) fill();
    pick();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    pick();
  });
  stop.addEventListener("click", () => halt(t("Stopped.")));
  form.querySelector(".copy-link").addEventListener("click", (event) => {
    if (!local) history.replaceState(null, "", address());
    copy(event.target, location.href);
  });
  box.querySelector(".copy-file").addEventListener("click", (event) => copy(event.target, file.value));
  shown.addEventListener("click", ({ target }) => {
    if (target.matches(".copy-command")) copy(target, shown.querySelector("pre").textContent);
  });
  box.querySelector(".estimate").addEventListener("click", () => ask({ file: file.value }));
  restore();
})();
