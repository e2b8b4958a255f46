// Runs before the answer below it is painted: where the address asks for another one, that of the page is never seen.
(() => {
  const names = document.currentScript.dataset.names.split(" ");
  const given = [...new URLSearchParams(location.search).keys()];
  const asked = given.some((name) => names.includes(name.split(".")[0]));
  document.currentScript.parentElement.classList.toggle("asked", asked);
})();
