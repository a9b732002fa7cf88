// Formulas that Markdown left as \( … \) and \[ … \]; everything is in tex-svg.js, nothing is fetched.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*", processHtmlClass: "arithmatex", enableMenu: false },
};
