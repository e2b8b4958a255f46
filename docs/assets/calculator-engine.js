// Asks calc in its worker, for whichever page: the last question counts, and its answer is shown as it grows.
window.calculatorEngine = (() => {
  const local = location.protocol === "file:";
  const OFFLINE = t("The calculator works on the site, not from a folder; the tables of the pages work everywhere.");
  const FAILED = {
    loading: t("The calculator could not be loaded: check the connection and ask again. The tables below need nothing."),
    answering: t("This question hit a bug in the calculator: change a field and ask again, or use python -m calc. The browser's console has the details for a bug report."),
  };

  const STAGES = {
    provisional: (line) => t("Provisional: {line}. PyTorch's allocator is being replayed …", { line }),
    growing: (line) => t("{line}. Other configurations are being compared …", { line }),
  };

  // `site` says where the page lies; `state` tells, `stop` stops, `shown` holds the answer. `answered` gets what it
  // shows anew, and true the first time.
  return ({ site, state, stop, shown, answered }) => {
    let worker, asked = null, count = 0, html = null;

    function tell(words, kind = "") {
      state.textContent = words;
      state.className = `state ${kind}`;
    }

    function settle(words, kind) {
      asked = null;
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
      worker = undefined;
      // an answer that only lacks what stands beside it is kept
      if (shown.dataset.stage === "growing") return settle(words, kind);
      refused(words, kind);
    }

    // What only gets longer keeps what the reader has opened in it.
    function show(answer) {
      const first = html === null;
      if (!first && answer.html.startsWith(html)) shown.insertAdjacentHTML("beforeend", answer.html.slice(html.length));
      else {
        shown.innerHTML = answer.html;
        answered(answer, first);
      }
      html = answer.html;
      shown.hidden = false;
      shown.dataset.stage = answer.stage;
      if (answer.stage === "whole") return settle(answer.line);
      shown.removeAttribute("aria-busy");
      tell(STAGES[answer.stage](answer.line), "working");
    }

    function running() {
      if (worker) return worker;
      const made = (worker = calculatorWorker());
      worker.onmessage = ({ data }) => {
        if (made !== worker) return;
        if (data.words) return tell(t(data.words, data.values), "working");
        if (data.ready) return asked || tell("");
        if (data.failed) {
          worker = worker.terminate(); // nobody knows what it still can do: another one starts
          if (!asked) return tell(FAILED[data.failed], "error");
          const earlier = data.failed === "answering" && data.id !== asked.question.id;
          return earlier ? running().postMessage(asked) : refused(FAILED[data.failed]);
        }
        if (data.id !== asked?.question.id) return;
        if (data.answer.error) return refused(data.answer.error);
        show(data.answer);
      };
      worker.onerror = () => halt(FAILED.loading, "error");
      return worker;
    }

    function warm() {
      if (local) return tell(OFFLINE, "error");
      running();
    }

    function ask(question) {
      if (local) return refused(OFFLINE);
      html = null;
      delete shown.dataset.stage;
      shown.hidden = false;
      shown.setAttribute("aria-busy", "true");
      stop.hidden = false;
      const { root, translated } = site;
      asked = { question: { root, translated, language: document.documentElement.lang, id: ++count, ...question } };
      running().postMessage(asked);
    }

    stop.addEventListener("click", () => halt(t("Stopped."), ""));
    return { ask, warm, local };
  };
})();
