// Runs before the answer below it is painted: where the address asks for another one, that of the page is never seen, and
// the worker that computes it is started at once.
(() => {
  const { src, dataset, parentElement } = document.currentScript;
  const names = dataset.names.split(" ");
  const given = [...new URLSearchParams(location.search).keys()];
  const asked = given.some((name) => names.includes(name.split(".")[0]));
  let first;

  function start() {
    const worker = new Worker(new URL("calculator-worker.js", src), { type: "module" });
    worker.postMessage({ engine: new URL(dataset.engine, location.href).href });
    return worker;
  }

  window.calculatorWorker = () => {
    const worker = first ?? start();
    first = undefined;
    return worker;
  };
  parentElement.classList.toggle("asked", asked);
  if (asked && location.protocol !== "file:") first = start();
})();
