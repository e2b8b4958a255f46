// The theme opens all that folds before it prints: this marks what the reader has opened, and the style sheet prints that.
for (const open of document.querySelectorAll("details[open]")) open.toggleAttribute("data-opened", true);
addEventListener("click", ({ target }) => {
  const folded = target.closest?.("summary")?.parentElement;
  folded?.toggleAttribute("data-opened", !folded.open);
});
