// The list of samples: filter, order, and the keys that lead from one to another and into a response.

const SORTS = {
  "as stored": () => 0,
  length: (item) => item.length,
  "mean logprob": (item) => item.logprob,
  "mean support": (item) => item.support ?? 0,
};
for (const name of samples.rewards) SORTS[`reward ${name}`] = (item) => item.rewards[name] ?? -Infinity;

const joiner = samples.decoded ? "" : " ";
for (const item of samples.items) {
  item.starts = [0];
  for (const size of item.sizes) item.starts.push(item.starts.at(-1) + Math.min(size, content.shown_ids));
  item.text = item.tokens.map((_, place) => tokenText(item, place)).join(joiner);
  const prompt = item.prompt.map(([, text]) => text);
  item.haystack = [reference(item), item.text, item.metadata ?? "", ...prompt].join("\n").toLowerCase();
}

/** Those that pass the filter, in order. */
let shown = [];
const reasons = [...new Set(samples.items.map((item) => item.reason))].sort();
const options = (values) => values.map((value) => make("option", { value }, value));
const refresh = { input: () => refilter(), change: () => refilter() };
const filter = make("input", {
  type: "search",
  id: "filter",
  placeholder: "Filter by text  ( / )",
  "aria-label": "Filter by text of prompt, response, id or metadata",
  "aria-keyshortcuts": "/",
  autocomplete: "off",
  spellcheck: "false",
  on: { ...refresh, keydown: leaveFilter },
});
const reason = make("select", { id: "reason", on: refresh }, make("option", { value: "" }, "any"), options(reasons));
const sort = make("select", { id: "sort", on: refresh }, options(Object.keys(SORTS)));
const descending = make("input", { type: "checkbox", id: "descending", on: refresh });
const status = make("p", { class: "status", role: "status" });
const list = make("ul", { id: "list", role: "listbox", tabindex: 0, "aria-label": "Samples" });

function refilter() {
  const wanted = filter.value.toLowerCase();
  const key = SORTS[sort.value];
  shown = samples.items.filter(
    (item) => (reason.value === "" || item.reason === reason.value) && item.haystack.includes(wanted),
  );
  if (sort.value !== "as stored") shown.sort((one, other) => key(one) - key(other));
  if (descending.checked) shown.reverse();
  status.textContent =
    shown.length === samples.items.length
      ? plural(shown.length, "sample")
      : `${count(shown.length)} of ${plural(samples.items.length, "sample")}`;
  list.replaceChildren(...shown.map(entryOf));
  select(shown.includes(current) ? current : (shown[0] ?? null));
}

function entryOf(item) {
  const numbers = `${plural(item.length, "token")}, logprob ${rounded(item.logprob, 2)}`;
  const rewards = Object.entries(item.rewards).map(
    ([name, value]) => `${name} ${value === null ? "not scored" : significant(value)}`,
  );
  item.entry = make(
    "li",
    { role: "option", id: `sample-${samples.items.indexOf(item)}`, "aria-selected": "false" },
    make("span", { class: "key" }, reference(item)),
    make("span", { class: "badge" }, item.reason),
    make("span", { class: "snippet" }, item.text.slice(0, 200).replaceAll(/\s+/g, " ").trim() || "(white space)"),
    make("span", { class: "numbers" }, [numbers, ...rewards].join(", ")),
  );
  item.entry.addEventListener("click", () => select(item));
  return item.entry;
}

function select(item) {
  current?.entry?.setAttribute("aria-selected", "false");
  const changed = item !== current;
  current = item;
  if (item === null) {
    list.removeAttribute("aria-activedescendant");
    detail.replaceChildren(make("p", {}, "No sample matches the filter."));
    panel.replaceChildren();
    return;
  }
  item.entry.setAttribute("aria-selected", "true");
  list.setAttribute("aria-activedescendant", item.entry.id);
  keepInView(item.entry);
  if (changed) showSample(item);
}

/** Scrolls the list, and not the window. */
function keepInView(entry) {
  const above = entry.offsetTop - list.offsetTop - list.scrollTop;
  const below = above + entry.offsetHeight - list.clientHeight;
  if (above < 0) list.scrollTop += above;
  else if (below > 0) list.scrollTop += below;
}

function move(steps) {
  const place = shown.indexOf(current) + steps;
  if (shown.length) select(shown[Math.max(0, Math.min(shown.length - 1, place))]);
}

function leaveResponse() {
  closePanel();
  list.focus();
}

function leaveFilter(event) {
  if (event.key === "Escape") {
    filter.value = "";
    refilter();
    list.focus();
    event.preventDefault();
  } else if (event.key === "Enter" || event.key === "ArrowDown") {
    list.focus();
    event.preventDefault();
  }
  event.stopPropagation();
}

/** `/` anywhere but in the filter, which keeps its keys (`leaveFilter`); j, k too, but for a menu, where letters lead to
 *  options; the arrows, Home and End in the list and (up, down) in a response. From sample to sample leads to the list. */
function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !samples.items.length) return;
  if (event.target.tagName === "SELECT" && event.key !== "/") return;
  const inList = event.target === list;
  const inResponse = Boolean(event.target.closest?.("#response"));
  const steps = { j: 1, k: -1, ...(inList || inResponse ? { ArrowDown: 1, ArrowUp: -1 } : {}) }[event.key];
  const ends = inList ? { Home: -Infinity, End: Infinity }[event.key] : undefined;
  if (event.key === "/") filter.focus();
  else if (steps !== undefined || ends !== undefined) {
    move(steps ?? ends);
    list.focus();
  } else if (event.key === "Escape" && (inResponse || panel.contains(event.target))) leaveResponse();
  else if (inList && (event.key === "ArrowRight" || event.key === "Enter") && current) focusToken(focused);
  else return;
  event.preventDefault();
}
