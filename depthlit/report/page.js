// Filters of the list of runs. Their state stands in the address behind #, so that a view can be linked and reloaded.
"use strict";
const form = document.getElementById("filters");
const all = [...document.querySelectorAll("details.run")];
const chosen = () => [...new FormData(form)].filter(([, value]) => value);

function apply() {
  const wanted = chosen().map(([key, value]) => [key, value.trim().toLowerCase()]);
  let shown = 0;
  for (const run of all) {
    const fits = wanted.every(([key, value]) =>
      key === "words" ? run.dataset.words.includes(value) : run.dataset[key].toLowerCase() === value);
    run.hidden = !fits;
    shown += fits;
  }
  form.querySelector("output").value = `${shown} of ${all.length} runs`;
}

function restore() {
  if (!location.hash.includes("=")) return;
  const said = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) if (field.name) field.value = said.get(field.name) ?? "";
  const open = said.get("open");
  if (open) document.getElementById(`run-${open}`)?.setAttribute("open", "");
  apply();
  (open ? document.getElementById(`run-${open}`) : document.getElementById("runs"))?.scrollIntoView();
}

form.hidden = false;
form.addEventListener("input", () => {
  apply();
  history.replaceState(null, "", `#${new URLSearchParams(chosen())}`);
});
form.addEventListener("reset", () => setTimeout(() => form.dispatchEvent(new Event("input"))));
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", restore);
apply();
restore();
