"use strict";
const shown = document.documentElement.dataset.version;
setInterval(async () => {
  try {
    const answer = await fetch("/version", { cache: "no-store" });
    if ((await answer.text()) !== shown) location.reload();
  } catch {
    document.getElementById("live").textContent = "The run is over or was stopped; its folder has the report.";
  }
}, 1500);
