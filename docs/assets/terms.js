// A mouse shows what a term means, its title, by itself; a finger by this: it writes the meaning behind the term.
addEventListener("click", ({ target }) => {
  const open = document.querySelector("abbr + .meaning");
  const last = open?.previousElementSibling;
  open?.remove();
  const term = target.closest("abbr[title]");
  if (!term || term === last) return;
  const meaning = document.createElement("span");
  meaning.className = "meaning";
  meaning.setAttribute("role", "note");
  meaning.textContent = ` (${term.title})`;
  term.after(meaning);
});
