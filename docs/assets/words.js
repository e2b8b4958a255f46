// What scripts say, in the language of the page: its words stand in the page, by the English ones.
window.t = (() => {
  const words = JSON.parse(document.getElementById("words")?.textContent ?? "{}");
  return (said, values = {}) => (words[said] ?? said).replace(/\{(\w+)\}/g, (_, name) => values[name]);
})();
