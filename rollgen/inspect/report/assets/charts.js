// Light and dark, and the figures in the colours of either.

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
const themeButton = make("button", { type: "button", class: "theme", on: { click: toggleTheme } });

function toggleTheme() {
  chosenTheme = root.dataset.theme === "dark" ? "light" : "dark";
  paint();
}

function paint() {
  const theme = chosenTheme ?? (prefersDark.matches ? "dark" : "light");
  root.dataset.theme = theme;
  themeButton.textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
  themeButton.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  for (const figure of figures) if (figure.drawn) draw(figure);
}

const figures = content.figures.map((figure) => ({ ...figure, drawn: false, plot: null }));
const PLAIN = "rgba(0,0,0,0)";

/** A colour of the theme: `blue` is the custom property `--plot-blue`. */
const colour = (name) => getComputedStyle(root).getPropertyValue(`--plot-${name}`).trim();

/** `value` with the names of colours (`@blue`) replaced, where a key says that it is a colour. */
function coloured(value, key = "") {
  if (Array.isArray(value)) return value.map((member) => coloured(member, key));
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, member]) => [name, coloured(member, name)]));
  }
  const isName = typeof value === "string" && key.endsWith("color") && value.startsWith("@");
  return isName ? colour(value.slice(1)) : value;
}

function layoutOf(figure) {
  const grid = colour("grid");
  const title = { standoff: 10, font: { size: 13 } };
  const merged = (own = {}) => ({
    gridcolor: grid,
    zerolinecolor: grid,
    automargin: true,
    ...own,
    title: { ...title, ...own.title },
  });
  const text = colour("text");
  return {
    height: 310,
    margin: { l: 52, r: 18, t: 14, b: 46 },
    font: { family: getComputedStyle(root).getPropertyValue("--sans"), size: 13, color: text },
    paper_bgcolor: PLAIN,
    plot_bgcolor: PLAIN,
    dragmode: false,
    legend: {
      orientation: "h",
      traceorder: "normal",
      x: 0,
      y: 1.02,
      yanchor: "bottom",
      itemclick: false,
      itemdoubleclick: false,
    },
    hoverlabel: { bgcolor: colour("background"), bordercolor: text, font: { color: text } },
    ...coloured(figure.layout),
    xaxis: merged(figure.layout.xaxis),
    yaxis: merged(figure.layout.yaxis),
  };
}

function draw(figure) {
  figure.drawn = true;
  Plotly.react(figure.plot, coloured(figure.data), layoutOf(figure), { displayModeBar: false, responsive: true });
}

/** Figures are drawn when they come near the window: a page opens before its last one is needed. */
const nearby = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const figure = figures.find(({ plot }) => plot === entry.target);
      if (entry.isIntersecting && !figure.drawn) draw(figure);
    }
  },
  { rootMargin: "600px" },
);

function figureOf(figure) {
  figure.plot = make("div", { class: "plot", role: "img", "aria-label": `${figure.title}. ${figure.sentence}` });
  nearby.observe(figure.plot);
  const heading = `figure-${figure.key}`;
  return make(
    "figure",
    { "aria-labelledby": heading },
    make("h3", { id: heading }, figure.title),
    figure.plot,
    make("figcaption", {}, figure.sentence),
    make("details", {}, make("summary", {}, "Numbers"), make("div", { class: "scroll", tabindex: 0 }, table(figure))),
  );
}

function table({ head, rows }) {
  const told = (number) => (Number.isSafeInteger(number) ? count(number) : significant(number));
  const cell = (value) => (typeof value === "number" ? told(value) : value);
  const row = (values) =>
    make(
      "tr",
      {},
      values.map((value) => make("td", { class: typeof value === "number" ? "number" : null }, cell(value))),
    );
  return make(
    "table",
    {},
    make("thead", {}, make("tr", {}, head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, rows.map(row)),
  );
}
