// Asks calc in its worker, for whichever page: one question at a time, of those that come meanwhile only the last.
window.calculatorEngine = (() => {
  const script = new URL("calculator-worker.js", document.currentScript.src).href;
  const local = location.protocol === "file:";
  const OFFLINE = t("The calculator works on the site, not from a folder; the tables of the pages work everywhere.");
  const FAILED = {
    loading: t("The calculator could not be loaded: check the connection and ask again. The tables below need nothing."),
    answering: t("This question hit a bug in the calculator: change a field and ask again, or use python -m calc. The browser's console has the details for a bug report."),
  };

  // `site` says where the engine lies; `state` tells, `stop` stops, `shown` holds the answer; `answered` gets each one.
  return ({ site, state, stop, shown, answered }) => {
    let worker, busy = false, next = null;
    const absolute = (address) => new URL(address, location.href).href;
    const sent = (question) => ({
      site: { engine: absolute(site.engine) },
      question: question && {
        root: site.root, translated: site.translated, language: document.documentElement.lang, ...question,
      },
    });

    function tell(words, kind = "") {
      state.textContent = words;
      state.className = `state ${kind}`;
    }

    function settle(words, kind) {
      busy = false;
      shown.removeAttribute("aria-busy");
      stop.hidden = true;
      tell(words, kind);
    }

    // What was shown belonged to another question.
    function refused(words, kind = "error") {
      shown.hidden = true;
      settle(words, kind);
    }

    function halt(words, kind) {
      worker?.terminate();
      worker = next = null;
      refused(words, kind);
    }

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
        if (data.failed) return asked ? refused(FAILED[data.failed]) : tell(FAILED[data.failed], "error");
        if (data.answer.error) return refused(data.answer.error);
        shown.innerHTML = data.answer.html;
        shown.hidden = false;
        answered(data.answer);
        settle(data.answer.line);
      };
      worker.onerror = () => halt(FAILED.loading, "error");
      return worker;
    }

    function warm() {
      if (local) return tell(OFFLINE, "error");
      if (!worker) running().postMessage(sent(null));
    }

    function ask(question) {
      if (local) return refused(OFFLINE);
      shown.hidden = false;
      shown.setAttribute("aria-busy", "true");
      if (busy) return void (next = question);
      busy = true;
      stop.hidden = false;
      running().postMessage(sent(question));
    }

    stop.addEventListener("click", () => halt(t("Stopped."), ""));
    return { ask, warm, local };
  };
})();
