// A tap on a policy's name lifts its curve in every picture of that part of the page.
document.addEventListener("click", (event) => {
  const key = event.target.closest("button[data-key]");
  if (!key) return;
  const on = key.getAttribute("aria-pressed") !== "true";
  key.setAttribute("aria-pressed", String(on));
  const part = key.closest("details") || document;
  for (const mark of part.querySelectorAll("[data-policy]")) {
    if (mark.dataset.policy !== key.dataset.key) continue;
    mark.classList.toggle("on", on);
    if (on) mark.parentNode.appendChild(mark);
  }
});
