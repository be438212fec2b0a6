// The page: headline, figures, samples, configuration.

function headline() {
  const cards = content.headline.map(({ label, value, more }) =>
    make("div", { class: "card" }, make("dt", {}, label), make("dd", {}, value), make("dd", { class: "more" }, more)),
  );
  return make("dl", { class: "headline" }, cards);
}

function notes() {
  if (!content.notes.length) return null;
  return make("ul", { class: "notes", "aria-label": "Notes" }, content.notes.map((note) => make("li", {}, note)));
}

function browser() {
  const all = samples.items.length === samples.of;
  const told = all
    ? `All ${plural(samples.of, "sample")} of the dataset.`
    : `${count(samples.items.length)} of ${plural(samples.of, "sample")}, chosen at random and, as far as there are ` +
      "enough, from each finish reason alike.";
  const keys =
    "Keys: j and k go to the list and from sample to sample, as the arrows do there; right goes from the list into " +
    "the response, there left and right from token to token, Escape back; / goes to the filter.";
  const labelled = (text, field) => make("label", {}, `${text} `, field);
  const controls = make(
    "div",
    { class: "controls", role: "search" },
    filter,
    labelled("Finish", reason),
    labelled("Sort", sort),
    make("label", { class: "check" }, descending, " descending"),
    status,
  );
  const untold = "This dataset has no tokenizer/tokenizer.json: tokens are shown as ids.";
  return make(
    "section",
    { id: "samples", "aria-labelledby": "samples-title" },
    make("h2", { id: "samples-title" }, "Samples"),
    make("p", {}, told, " ", make("span", { class: "quiet" }, keys)),
    samples.decoded ? null : make("p", {}, untold),
    make(
        "div",
        { class: "browser" },
        make("div", { class: "choose" }, controls, list),
        make("div", { class: "reading" }, detail, panel),
      ),
  );
}

function configuration() {
  const setting = ([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value));
  const sections = content.configuration.map(({ title, rows }) =>
    make(
      "div",
      {},
      make("h3", {}, title),
      make("table", {}, make("tbody", {}, rows.map(setting))),
    ),
  );
  return make(
    "section",
    { id: "configuration", "aria-labelledby": "configuration-title" },
    make("h2", { id: "configuration-title" }, "Configuration"),
    make("div", { class: "configuration" }, sections),
  );
}

function header() {
  const links = [["#figures", "Figures"], ["#samples", "Samples"], ["#configuration", "Configuration"]];
  return make(
    "header",
    {},
    make("h1", {}, content.name),
    make("nav", { "aria-label": "Sections" }, links.map(([href, name]) => make("a", { href }, name)), themeButton),
  );
}

const drawn = figures.length ? figures.map(figureOf) : [make("p", {}, "Nothing is stored yet.")];
document.body.prepend(
  make("a", { class: "skip", href: "#samples" }, "Skip to the samples"),
  header(),
  make(
    "main",
    {},
    make("section", { "aria-label": "Headline figures" }, headline(), notes()),
    make(
      "section",
      { id: "figures", "aria-labelledby": "figures-title" },
      make("h2", { id: "figures-title" }, "Figures"),
      make("div", { class: "figures" }, drawn),
    ),
    browser(),
    configuration(),
  ),
);
document.addEventListener("keydown", press);
prefersDark.addEventListener("change", paint);
addEventListener("beforeprint", () => figures.forEach(draw));
paint();
if (samples.items.length) refilter();
else detail.replaceChildren(make("p", {}, "Nothing is stored yet."));
