// The theme's search, loaded by the first word that a reader types, and with it the index. The theme sends its worker
// the settings (0) and queries (2); the worker says that it is ready (1), and answers (3).
const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3];
const theme = new URL(location.search.slice(1), location.href);
const held = []; // queries that came before the index
let options, loaded = false, state = "idle";

const load = self.importScripts.bind(self);
self.importScripts = (...scripts) => load(...scripts.map((script) => new URL(script, theme).href));

const post = self.postMessage.bind(self);
self.postMessage = (message) => {
  if (message.type !== READY) return post(message);
  state = "ready";
  const last = held.pop(); // what a reader typed meanwhile; the rest was on the way to it
  held.length = 0;
  if (last) ask(last);
};

const pass = (data) => dispatchEvent(new MessageEvent("message", { data }));

// A question in Chinese has no spaces between its words: they follow it, each by itself.
const words = Intl.Segmenter ? new Intl.Segmenter("zh", { granularity: "word" }) : { segment: () => [] };
const parted = new WeakSet();
const ask = ({ type, data: said }) => {
  const runs = (said.match(/\p{Script=Han}+/gu) ?? []).flatMap((run) => {
    const found = [...words.segment(run)].map(({ segment }) => segment);
    return found.length > 1 ? found : [];
  });
  const data = { type, data: [said, ...runs].join(" ") };
  parted.add(data);
  pass(data);
};
const begin = async () => {
  state = "loading";
  try {
    const answer = await fetch(new URL("../search/index.json", location.href));
    if (!answer.ok) throw new Error(`${answer.status} ${answer.url}`);
    const { config, docs } = await answer.json();
    if (!loaded) load(theme.href);
    loaded = true;
    state = "starting";
    pass({ type: SETUP, data: { config, docs, options } });
  } catch (fault) {
    console.warn(fault);
    state = "idle"; // the next letter tries again
    held.length = 0;
    post({ type: RESULT, data: { items: [] } });
  }
};

addEventListener("message", (event) => {
  if (state === "starting" && event.data.type === SETUP) return; // our own, for the theme
  if (state === "ready" && (event.data.type !== QUERY || parted.has(event.data))) return;
  event.stopImmediatePropagation();
  if (state === "ready") return ask(event.data);
  const { type, data } = event.data;
  if (type === SETUP) {
    ({ options } = data);
    return post({ type: READY });
  }
  if (type !== QUERY) return;
  if (!data) return post({ type: RESULT, data: { items: [] } });
  held.push(event.data);
  if (state === "idle") begin();
});
