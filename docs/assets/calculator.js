// The calculator's picker: its fields are the address, its answers come from calc in a worker.
(() => {
  const box = document.getElementById("calculator");
  const site = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const form = box.querySelector("form");
  const shown = box.querySelector(".answer");
  const file = box.querySelector("textarea");
  const more = form.querySelector(".rest");
  const NUMBER = /^\d{1,15}(\.\d{1,15})?$/;
  const KEPT = ["model", "task", "gpu", "gpus", "ask"]; // whatever the task
  const fields = [...form.elements].filter((field) => field.name);
  const named = new Map(fields.map((field) => [field.name, field]));
  const rest = new Map(); // what the job has beyond the form's fields
  const beside = new URLSearchParams(location.search).getAll("compare"); // the jobs to compare it with
  const engine = calculatorEngine({
    site,
    shown,
    state: form.querySelector(".state"),
    stop: form.querySelector(".stop"),
    answered(answer, first) {
      box.classList.remove("asked");
      file.value = answer.file;
      if (first && answer.fields) fill(new Map(Object.entries(answer.fields)));
      if (first && answer.fields) remember();
      const link = shown.querySelector(".beside");
      if (link && beside.length) {
        link.search = `${new URLSearchParams(beside.map((other) => ["compare", other]))}&${link.search.slice(1)}`;
        link.textContent = t("Back to the comparison, with this job");
      }
    },
  });

  // ---- the picker and the address

  const task = () => (Object.hasOwn(site.defaults, form.task.value) ? form.task.value : "sft");
  // What a field is if nobody sets it; a job of which the framework fills the rest has nothing else.
  const usual = (name) => (named.get("ask").value ? "" : String(site.defaults[task()][name] ?? ""));
  const owed = (name) => Object.values(site.defaults).some((own) => name in own);
  const applies = (field) => field.closest(".field").dataset.tasks?.split(" ").includes(form.task.value) ?? true;

  function relevant() {
    for (const field of fields) field.closest(".field").hidden = !field.value && !applies(field);
    for (const group of form.querySelectorAll("details")) group.hidden = !group.querySelector(".field:not([hidden])");
    more.hidden = !rest.size;
    more.replaceChildren(t("Also in this job:"), ...[...rest].map(([name, value]) => left(name, value)));
  }

  function left(name, value) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "md-button";
    button.textContent = `${name}: ${value} ✕`;
    button.setAttribute("aria-label", t("Leave out {field}", { field: `${name}: ${value}` }));
    button.addEventListener("click", () => {
      rest.delete(name);
      relevant();
      pick();
    });
    return button;
  }

  function set(field, value) {
    if (field.options && ![...field.options].some((option) => option.value === value)) {
      field.add(new Option(value, value)); // calc says what is wrong with it, or it is the reader's own
    }
    if (field.type === "number" && value && !NUMBER.test(value)) field.type = "text"; // calc says so
    field.value = value;
  }

  // Another task: its lengths and framework, and nothing that it lacks; what the reader set beside them stays.
  function retask() {
    for (const field of fields.filter((field) => !KEPT.includes(field.name))) {
      if (!applies(field)) field.value = "";
      else if (owed(field.name) && !named.get("ask").value) set(field, usual(field.name));
    }
    relevant();
  }

  // The form shows these fields and no others.
  function fill(given) {
    for (const name of ["ask", "task", ...named.keys()]) {
      if (given.has(name)) set(named.get(name), given.get(name));
      else if (name !== "model" && name !== "task") set(named.get(name), usual(name));
    }
    rest.clear();
    for (const [name, value] of given) {
      if (!named.has(name) && site.heads.includes(name.split(".")[0])) rest.set(name, value);
    }
    relevant();
  }

  function job() {
    const asked = Object.fromEntries(rest);
    for (const { name, value } of fields) if (value.trim()) asked[name] = value;
    return asked;
  }

  // The fields of the job that no default gives, and those that the reader has emptied.
  function query() {
    const found = new URLSearchParams(Object.entries(job()).filter(([name, v]) => KEPT.includes(name) || v !== usual(name)));
    for (const field of fields) if (!field.value && usual(field.name) && applies(field)) found.set(field.name, "");
    return found;
  }

  function remember() {
    const found = query();
    for (const other of beside) found.append("compare", other);
    if (!engine.local) history.replaceState(null, "", `?${found}#calculator`);
  }

  function restore() {
    if (!box.classList.contains("asked")) return relevant();
    fill(new Map(new URLSearchParams(location.search)));
    for (const group of form.querySelectorAll("details")) {
      group.open = [...group.querySelectorAll("[name]")].some((field) => field.value !== usual(field.name));
    }
    engine.ask({ job: job() });
  }

  function pick() {
    remember();
    engine.ask({ job: job() });
  }

  const read = (text) => engine.ask({ file: text, job: job() });
  const open = async (files) => files.length && read(await files[0].text());

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

  form.addEventListener("focusin", engine.warm, { once: true });
  form.addEventListener("pointerdown", engine.warm, { once: true });
  form.addEventListener("change", ({ target }) => {
    if (target.type === "file") return open(target.files);
    if (target === form.task) retask();
    pick();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    pick();
  });
  // A config.json, or a scenario: calc knows which.
  form.addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text");
    if (!text.trim().startsWith("{")) return;
    event.preventDefault();
    read(text);
  });
  for (const place of [form, file]) {
    place.addEventListener("dragover", (event) => event.preventDefault());
    place.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      open(event.dataTransfer.files);
    });
  }
  form.querySelector(".copy-link").addEventListener("click", (event) => {
    remember();
    copy(event.target, location.href);
  });
  box.querySelector(".copy-file").addEventListener("click", (event) => copy(event.target, file.value));
  shown.addEventListener("click", ({ target }) => {
    if (target.matches(".copy-command")) copy(target, shown.querySelector("pre").textContent);
  });
  box.querySelector(".estimate").addEventListener("click", () => read(file.value));
  restore();
})();
