"use strict";
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const drawings = figure.querySelectorAll(".chart");
  const tip = figure.querySelector(".tip");
  for (const button of figure.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const svg of drawings) {
        svg.querySelector(`[data-series="${button.dataset.series}"]`)?.classList.toggle("off", !shown);
      }
    });
  }
  let at = null;
  const leave = () => { if (at) { at.classList.remove("at"); at = null; } };
  for (const svg of drawings) {
    svg.addEventListener("pointermove", (event) => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = null, least = 1e9;
      for (const circle of svg.querySelectorAll(".series:not(.off) circle")) {
        const far = (circle.cx.baseVal.value - point.x) ** 2 + (circle.cy.baseVal.value - point.y) ** 2;
        if (far < least) { best = circle; least = far; }
      }
      if (best === at || best === null) return;
      leave();
      at = best;
      at.classList.add("at");
      tip.textContent = at.dataset.tip;
    });
    svg.addEventListener("pointerleave", leave);
  }
}
window.addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});
