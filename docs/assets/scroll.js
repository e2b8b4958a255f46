// The theme puts wide tables of prose into boxes that scroll: the keyboard must reach them, too.
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
});
