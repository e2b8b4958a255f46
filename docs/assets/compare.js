// Jobs side by side: the address holds them, the answer comes from calc in a worker, and this moves what is typed.
(() => {
  const box = document.getElementById("compare");
  const site = JSON.parse(box.querySelector("script[type='application/json']").textContent);
  const shown = box.querySelector(".answer");
  const form = () => box.querySelector(":scope > form");
  const stops = () => [...form().querySelectorAll("input, select, button, a")]; // of the keyboard
  const engine = calculatorEngine({
    site,
    shown,
    state: box.querySelector(".state"),
    stop: box.querySelector(".stop"),
    answered() {
      box.classList.remove("asked");
      const at = stops().indexOf(document.activeElement);
      form().replaceWith(shown.querySelector("form"));
      stops()[at]?.focus();
      shown.querySelector(".here").href = location.href;
    },
  });
  let jobs, samples;

  function read(query) {
    jobs = query.has("compare") ? query.getAll("compare") : site.compare;
    samples = query.get("samples") ?? site.samples;
  }

  function go() {
    const query = new URLSearchParams(jobs.map((job) => ["compare", job]));
    if (samples !== site.samples) query.set("samples", samples);
    if (!engine.local) history.pushState(null, "", `?${query}`);
    engine.ask({ compare: jobs, samples });
  }

  // A job with some of its fields changed.
  function changed(job, values) {
    const query = new URLSearchParams(job);
    for (const [name, value] of Object.entries(values)) value ? query.set(name, value) : query.delete(name);
    return query.toString();
  }

  box.addEventListener("change", ({ target: { name, value } }) => {
    if (name === "samples") samples = value;
    else if (name.startsWith("price-")) jobs = jobs.map((job, n) => (name === `price-${n}` ? changed(job, { price: value }) : job));
    else return;
    go();
  });
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    const { gpu, gpus } = event.target.elements;
    jobs = [...jobs, changed(jobs[0], { gpu: gpu.value, gpus: gpus.value, gpus_per_node: "", price: "" })];
    go();
  });
  box.addEventListener("click", (event) => {
    if (!event.target.matches("a.ask")) return;
    event.preventDefault();
    read(new URL(event.target.href).searchParams);
    go();
  });
  addEventListener("popstate", () => {
    read(new URLSearchParams(location.search));
    engine.ask({ compare: jobs, samples });
  });
  box.addEventListener("focusin", engine.warm, { once: true });
  read(new URLSearchParams(location.search));
  if (box.classList.contains("asked")) engine.ask({ compare: jobs, samples });
})();
