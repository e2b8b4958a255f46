// What a computed table can do beyond being read: sort by a column, copy itself, show the ledger behind a cell.
// It holds no number: all comes from the page and from the files beside it. Without it every table stays readable.
(() => {
  "use strict";

  const top = new URL("..", document.currentScript.src);
  const served = location.protocol !== "file:"; // opened from a folder, a page may not read the files beside it
  const COPIED = { md: "Markdown", csv: "CSV", tex: "LaTeX" };
  const SHOWN = 2000; // milliseconds that a button says what it did
  const TURNS = { none: "ascending", ascending: "descending", descending: "none" };
  const order = new Intl.Collator("en", { numeric: true });

  const make = (tag, attributes = {}, ...inside) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  };
  const button = (name, pressed, ...inside) => {
    const made = make("button", { type: "button", class: name }, ...inside);
    made.addEventListener("click", () => pressed(made));
    return made;
  };
  const wrap = (place, made) => {
    made.append(...place.childNodes);
    place.append(made);
  };

  // ---- sorting

  const number = (text) => (text ? Number.parseFloat(text.replaceAll(",", "")) : Number.NaN);
  // A number's value, a verdict's peak, or the words before anything that unfolds.
  const value = (head, cell) => {
    if (head.classList.contains("verdict")) return number(cell.querySelector("b + span")?.textContent);
    if (head.classList.contains("number")) return number(cell.textContent);
    return (cell.querySelector("summary") ?? cell).textContent.trim();
  };
  // What has no value goes last, whichever way.
  const compare = (one, other, turn) => {
    if (typeof one === "string") return turn * order.compare(one, other);
    if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other);
    return turn * (one - other);
  };
  const sort = (table, rows, head) => {
    const turned = TURNS[head.getAttribute("aria-sort") ?? "none"];
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    const sorted = [...rows];
    if (turned !== "none") {
      head.setAttribute("aria-sort", turned);
      const turn = turned === "ascending" ? 1 : -1;
      const values = new Map(rows.map((row) => [row, value(head, row.cells[head.cellIndex])]));
      sorted.sort((one, other) => compare(values.get(one), values.get(other), turn));
    }
    table.tBodies[0].append(...sorted);
  };

  // ---- copying

  const say = (pressed, words) => {
    const before = pressed.dataset.name ?? (pressed.dataset.name = pressed.textContent);
    pressed.textContent = words;
    setTimeout(() => (pressed.textContent = before), SHOWN);
  };
  const copy = async (pressed, text) => {
    try {
      const blob = text.then((found) => new Blob([found], { type: "text/plain" }));
      await navigator.clipboard.write([new ClipboardItem({ "text/plain": blob })]);
      say(pressed, t("Copied"));
    } catch {
      say(pressed, t("Not copied"));
    }
  };
  const read = async (address) => {
    const answer = await fetch(address);
    if (!answer.ok) throw new Error(`${answer.status} ${address}`);
    return answer;
  };
  const offerCopies = (figure) => {
    const files = figure.querySelector("details.take");
    const buttons = Object.entries(COPIED).map(([end, name]) => {
      const address = files.querySelector(`a[href$=".${end}"]`).href;
      return button("copy", (pressed) => copy(pressed, read(address).then((answer) => answer.text())), name);
    });
    files.querySelector("summary").textContent = t("Download or copy");
    files.lastElementChild.after(make("p", { "aria-live": "polite" }, t("Copy as "), ...buttons));
    const cited = figure.querySelector("details.cite");
    const [line, bibtex] = [cited.querySelector("p"), cited.querySelector("pre")];
    const texts = { [t("Copy the line")]: line, [t("Copy BibTeX")]: bibtex };
    cited.lastElementChild.prepend(
      ...Object.entries(texts).map(([name, place]) =>
        button("copy", (pressed) => copy(pressed, Promise.resolve(place.textContent)), name),
      ),
    );
  };

  // ---- the working

  const tables = new Map();
  const load = (address) => {
    if (!tables.has(address)) tables.set(address, read(address).then((answer) => answer.json()));
    return tables.get(address);
  };
  const put = (values) =>
    Object.entries(values)
      .map(([name, v]) => `${name} = ${typeof v === "number" ? v.toLocaleString("en-US", { maximumFractionDigits: 12 }) : v}`)
      .join(", ");
  const sized = (bytes) => [
    make("td", { class: "number" }, (bytes / 2 ** 30).toFixed(3)),
    make("td", { class: "number" }, bytes.toLocaleString("en-US")),
  ];
  const lineRow = (line, names) => {
    const [page, anchor] = line.source.split("#");
    const derived = new URL(`method/${page}.html${anchor ? `#${anchor}` : ""}`, top);
    const outside = line.allocated === false ? [" ", make("small", {}, t("outside PyTorch's allocator"))] : [];
    const swatch = make("span", { class: `swatch c-${line.component}`, "aria-hidden": "true" });
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, swatch, t(names[line.component]), ...outside),
      make("td", {}, line.role),
      ...sized(line.bytes),
      make("td", {}, make("code", {}, line.formula)),
      make("td", {}, put(line.values)),
      make("td", {}, make("a", { href: derived.href }, line.source)),
    );
  };
  const HEADS = [t("Component"), t("Role"), "GiB", t("Bytes"), t("Formula"), t("Values put in"), t("Derived in")];
  const workingTable = (data, cell) => {
    const lines = cell.lines.map((place) => data.lines[place]);
    const together = lines.reduce((sum, line) => sum + line.bytes, 0);
    const heads = HEADS.map((name, place) =>
      make("th", { scope: "col", ...(place === 2 || place === 3 ? { class: "number" } : {}) }, name),
    );
    return make(
      "table",
      { class: "data" },
      make("thead", {}, make("tr", {}, ...heads)),
      make("tbody", {}, ...lines.map((line) => lineRow(line, data.components))),
      make("tfoot", {}, make("tr", {}, make("th", { scope: "row", colspan: 2 }, t("Together")), ...sized(together), make("td", { colspan: 3 }))),
    );
  };
  const open = (figure, data, cell, title) => {
    const close = button("close", () => shown.close(), t("Close"));
    const job = make("pre", { tabindex: "0" }, make("code", {}, JSON.stringify(cell.scenario, null, 1)));
    const about = t("Of “{table}”, at {moment}. Catalog {catalog}, calc {calc}.", {
      table: figure.querySelector("figcaption").textContent,
      moment: cell.at,
      catalog: data.catalog_version,
      calc: data.calc_version,
    });
    const [before, after] = t("The job, as {command} reads it", { command: "\n" }).split("\n");
    const shown = make(
      "dialog",
      { class: "working", "aria-labelledby": "working-title" },
      close,
      make("p", { id: "working-title", role: "heading", "aria-level": "2" }, title),
      make("p", {}, about),
      make("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": "working-title" }, workingTable(data, cell)),
      make("details", {}, make("summary", {}, before, make("code", {}, "python -m calc estimate -"), after), job),
    );
    shown.addEventListener("close", () => shown.remove());
    shown.addEventListener("click", (event) => event.target === shown && shown.close()); // beside it
    figure.parentElement.append(shown);
    shown.showModal();
  };
  const show = async (figure, rows, pressed) => {
    const on = pressed.getAttribute("aria-pressed") !== "true";
    pressed.setAttribute("aria-pressed", on);
    if (!on) {
      for (const made of figure.querySelectorAll("button.work")) made.replaceWith(...made.childNodes);
      figure.dispatchEvent(new Event("unworked"));
      return;
    }
    let data;
    try {
      data = await load(figure.querySelector('details.take a[href$=".json"]').href);
    } catch {
      pressed.setAttribute("aria-pressed", "false");
      return say(pressed, t("Not found"));
    }
    const folded = figure.querySelector("details.twin");
    if (folded) folded.open = true;
    const numbers = figure.querySelector(".numbers input");
    if (numbers) numbers.checked = true;
    const heads = [...figure.querySelectorAll("thead th")]; // columns that only draw are no th
    for (const cell of data.cells.filter((found) => found.lines?.length)) {
      const place = data.columns.findIndex((column) => column.key === cell.column);
      const row = rows[cell.row];
      const there = row.cells[heads[place].cellIndex];
      if (there.querySelector("button.work")) continue;
      const { title, unit } = data.columns[place];
      const name = unit ? `${title} (${unit})` : title;
      const words = `${row.cells[0].textContent.trim()} · ${name}: ${there.textContent.trim()}`;
      there.querySelector("a.job")?.replaceWith(...there.querySelector("a.job").childNodes);
      const made = button("work", () => open(figure, data, cell, words));
      made.title = t("Show the working");
      made.setAttribute("aria-haspopup", "dialog");
      wrap(there, made);
    }
  };

  for (const figure of document.querySelectorAll("figure.computed")) {
    const table = figure.querySelector("table.data");
    const rows = [...table.tBodies[0].rows]; // as the page has them, and the JSON
    if (rows.length > 2) {
      for (const head of table.tHead.rows[0].cells) {
        if (head.scope === "col") wrap(head, button("sort", () => sort(table, rows, head)));
      }
    }
    if (served && navigator.clipboard) offerCopies(figure);
    const under = figure.querySelector(".provenance");
    if (served && "worked" in under.dataset) {
      const pressed = button("show", () => show(figure, rows, pressed), t("Show the working"));
      pressed.setAttribute("aria-pressed", "false");
      pressed.title = t("Then choose a number");
      under.insertBefore(pressed, under.querySelector("details.take"));
    }
  }
})();
