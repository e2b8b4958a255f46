// Where the site's address was not known when it was built, citations take it from where they are read.
(() => {
  const top = new URL("..", document.currentScript.src);
  if (top.protocol === "file:") return;
  for (const cited of document.querySelectorAll("[data-address]")) {
    const { address } = cited.dataset;
    const texts = document.createTreeWalker(cited, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(address, new URL(address, top).href);
  }
})();
