// What-fits tables: filters that stand in the address, and from each cell a link to the calculator with the cell's job.
// What a row, a column and a cell are is written in the tables; without this file they show everything.
(() => {
  "use strict";

  const form = document.querySelector("form.filters");
  const tables = [...document.querySelectorAll("figure.computed table[data-job]")];
  const kept = new CSSStyleSheet();
  document.adoptedStyleSheets.push(kept);

  const FEW = 12; // cards that fit a sheet of paper with all that their cells say

  // ---- filters

  const between = (value, range) => {
    const [above, upto] = range.split("-").map(Number);
    return above < value && value <= upto;
  };
  const passes = ({ dataset }) => (field) =>
    !field.value ||
    !(field.name in dataset) ||
    (Number.isNaN(Number(dataset[field.name])) ? dataset[field.name] === field.value : between(dataset[field.name], field.value));
  const filter = () => {
    const fields = [...form.elements].filter((field) => field.name);
    const shown = (place) => fields.every(passes(place));
    const heads = [...tables[0].tHead.rows[0].cells].slice(1);
    const hidden = heads.filter((head) => !shown(head));
    kept.replaceSync(hidden.map((head) => `table[data-job] tr > :nth-child(${head.cellIndex + 1}) { display: none; }`).join(""));
    for (const row of tables.flatMap((table) => [...table.tBodies[0].rows])) row.hidden = !shown(row.cells[0]);
    const rows = [...tables[0].tBodies[0].rows];
    const [models, cards] = form.querySelectorAll("output b");
    models.textContent = rows.filter((row) => !row.hidden).length;
    cards.textContent = heads.length - hidden.length;
    for (const table of tables) {
      table.classList.toggle("few", heads.length - hidden.length <= FEW);
      enter(table);
    }
    const chosen = fields.filter((field) => field.value);
    for (const link of document.querySelectorAll(".switch a")) {
      link.search = new URLSearchParams(chosen.map((field) => [field.name, field.value]));
    }
    return fields;
  };
  const remember = (fields) => {
    const query = new URLSearchParams(location.search);
    for (const { name, value } of fields) value ? query.set(name, value) : query.delete(name);
    if (location.protocol !== "file:") history.replaceState(null, "", `?${query}${location.hash}`);
  };
  form.addEventListener("change", () => remember(filter()));

  // ---- links

  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const address = (table, head, row, cell) => {
    const query = new URLSearchParams({ model: row.cells[0].dataset.model, gpu: head.dataset.gpu });
    const rungs = JSON.parse(table.dataset.rungs);
    for (const part of [table.dataset.job, rungs[cell.dataset.rung ?? 0]]) {
      for (const [name, value] of new URLSearchParams(part)) query.set(name, value);
    }
    return `${document.getElementById("calculator") ? "" : table.dataset.calculator}?${query}#calculator`;
  };
  const link = (table) => {
    const heads = table.tHead.rows[0].cells;
    for (const row of table.tBodies[0].rows) {
      for (const cell of row.querySelectorAll("td:not(.none):not(:has(a))")) {
        const made = document.createElement("a");
        made.className = "job";
        made.tabIndex = -1;
        made.href = address(table, heads[cell.cellIndex], row, cell);
        made.append(...cell.childNodes);
        cell.append(made);
      }
    }
    enter(table);
  };
  const inSight = (made) => made?.checkVisibility({ contentVisibilityAuto: false });
  // The tabulator key enters a table at one cell; from there arrows lead on.
  const enter = (table) => {
    const made = [...table.querySelectorAll("a.job")];
    for (const old of made) old.tabIndex = -1;
    const first = made.find(inSight);
    if (first) first.tabIndex = 0;
  };
  const walk = (event) => {
    const from = event.target.closest("a.job");
    const step = STEPS[event.key];
    if (!from || !step) return;
    event.preventDefault();
    const table = from.closest("table");
    const rows = [...table.tBodies[0].rows];
    let [y, x] = [rows.indexOf(from.closest("tr")), from.closest("td").cellIndex];
    let to;
    do {
      y += step[0];
      x += step[1];
      to = rows[y]?.cells[x]?.querySelector("a.job");
    } while (rows[y]?.cells[x] && !inSight(to));
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  };

  const near = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      link(target.querySelector("table"));
    }
  }, { rootMargin: "50%" });
  for (const table of tables) {
    const figure = table.closest("figure");
    near.observe(figure);
    table.addEventListener("keydown", walk);
    figure.addEventListener("unworked", () => link(table)); // tables.js shows the working in place of a link
  }

  const asked = new URLSearchParams(location.search);
  for (const field of form.elements) {
    const value = asked.get(field.name);
    if (field.name && [...field.options].some((option) => option.value === value)) field.value = value;
  }
  filter();
})();
