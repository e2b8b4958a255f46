// My job died: a pasted text goes to calc in a worker of its own, its answer comes back as HTML.
(() => {
  const box = document.getElementById("diagnose");
  const site = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const form = box.querySelector("form.pasted");
  const area = form.querySelector("textarea");
  const LARGEST = 1_000_000; // characters; the end of a longer log is what tells
  const engine = calculatorEngine({
    site,
    shown: box.querySelector(".answer"),
    state: form.querySelector(".state"),
    stop: form.querySelector(".stop"),
    answered() {},
  });
  let snapshot = null; // a memory snapshot that was dropped, as base64
  let said = {}; // fields completed so far, for as long as the text stays the same

  function ask(fields) {
    said = fields;
    engine.ask({ diagnose: area.value.slice(-LARGEST), fields, ...(snapshot && { base64: snapshot }) });
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

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask({});
  });
  box.addEventListener("submit", (event) => {
    if (!event.target.matches("form.fields")) return;
    event.preventDefault();
    ask({ ...said, ...completed(event.target) });
  });
  form.querySelector(".clear").addEventListener("click", () => {
    area.value = "";
    snapshot = null;
    area.focus();
  });
  area.addEventListener("focus", engine.warm, { once: true });
  area.addEventListener("input", () => (snapshot = null));
  area.addEventListener("paste", () => setTimeout(() => ask({})));
  area.addEventListener("dragover", (event) => event.preventDefault());
  area.addEventListener("drop", async (event) => {
    const [file] = event.dataTransfer.files;
    if (!file) return;
    event.preventDefault();
    if (file.name.endsWith(".pickle")) {
      snapshot = await encoded(file);
      area.value = t("memory snapshot: {file}", { file: file.name });
    } else {
      snapshot = null;
      area.value = await file.slice(-LARGEST).text();
    }
    ask({});
  });
})();
