// One sample: its prompt, its response token by token, and the support of the token with the focus or under the mouse.

const samples = content.samples;
const BANDS = [0.9, 0.7, 0.4, 0.1, 0.01, 0];
let current = null;
/** Place of the token that has the focus, or had it last. */
let focused = 0;
const detail = make("div", { class: "detail" });
const panel = make("aside", { class: "panel", "aria-label": "Support of a token" });
/** Only a narrow window closes it: there it lies over the sample. */
const closePanel = () => panel.classList.remove("open");
const closeButton = make("button", { type: "button", class: "close", on: { click: leaveResponse } }, "Close");

const reference = (item) => `${item.run === null ? "" : `${item.run}/`}${item.id}:${item.sample}`;

const probabilityOf = (nats) => Math.exp(-nats / 1000);
const bandOf = (probability) => BANDS.findIndex((bound) => probability >= bound);
const percent = (probability) => {
  const digits = probability >= 0.1 || probability === 0 ? 1 : probability >= 0.001 ? 2 : 4;
  return `${(100 * probability).toFixed(digits)} %`;
};
const SIGNS = { "\n": "↵", " ": "␣", "\u200c": "◌", "\u200d": "◌" };
const INVISIBLE = /([ \n\u200c\u200d])/gu;
/** What would join the token before: marks, and what joins letters. */
const JOINS = /^[\p{Mn}\p{Me}\u200c\u200d]*/u;

const tokenText = (item, place) => item.texts[place] ?? samples.names[item.tokens[place]];
const partsOf = (item, place) =>
  (place in item.texts ? item.parts[place] : samples.parts[item.tokens[place]]) ?? [tokenText(item, place)];
const nameOf = (name) => samples.parts[name] ?? [samples.names[name]];

/** Nodes of a text in parts, of which every other one is spelled out: in a box, so that text cannot look like it. */
function shownParts([first, ...others], show) {
  const boxed = (text) => make("span", { class: "spelled" }, text);
  const [joined] = JOINS.exec(first);
  const rest = [first.slice(joined.length), ...others];
  return [joined ? boxed(`◌${joined}`) : null, ...rest.flatMap((part, at) => (at % 2 ? boxed(part) : show(part)))];
}

/** With nothing invisible in it: what the panel shows. */
const visible = (parts) =>
  shownParts(parts, (part) =>
    part.split(INVISIBLE).map((text, at) => (at % 2 ? make("span", { class: "sign" }, SIGNS[text]) : text)),
  );
/** As text runs, with its ends of lines. */
const running = (parts) => shownParts(parts, (part) => part.replaceAll("\n", "↵\n"));

function facts(item) {
  const size = item.support === null ? null : rounded(item.support, 1);
  const support = size === null ? "not truncated" : `${size} ${size === "1" ? "id" : "ids"} on average`;
  const rewards = Object.entries(item.rewards).map(([name, value]) => [
    `Reward ${name}`,
    value === null ? "not scored" : significant(value),
  ]);
  const told = [
    ...rewards,
    ["Finished by", item.reason],
    ["Tokens", `${count(item.length)}, prompt ${count(item.prompt_length)}`],
    ["Mean logprob", `${rounded(item.logprob, 3)} nats`],
    ["Support", support],
    ...item.facts,
  ];
  return make("dl", {}, told.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

function showSample(item) {
  focused = 0;
  const prompt = item.prompt.map(([role, text]) =>
    make("div", { class: "turn" }, role ? make("div", { class: "role" }, role) : null, make("pre", {}, text)),
  );
  const generation = item.generation ? `, generation ${item.generation}` : "";
  detail.replaceChildren(
    make("h3", {}, `${reference(item)}${generation}`),
    facts(item),
    make("h4", {}, `Prompt, ${plural(item.prompt_length, "token")}`),
    ...prompt,
    make("h4", {}, `Response, ${plural(item.length, "token")}`),
    legend(),
    responseOf(item),
    item.metadata === null
      ? ""
      : make("details", {}, make("summary", {}, "Metadata"), make("pre", {}, item.metadata)),
  );
  showToken(0);
  closePanel();
}

function legend() {
  const names = BANDS.map((bound, band) => {
    const upper = band ? BANDS[band - 1] : 1;
    return make("li", { class: `token b${band}` }, `${100 * bound}-${100 * upper} %`);
  });
  return make("ul", { class: "legend", "aria-label": "Colours and underlines of probabilities" }, names);
}

function responseOf(item) {
  const tokens = item.tokens.map((_, place) => tokenOf(item, place));
  if (item.gap) tokens.splice(item.gap[0], 0, gapOf(item));
  const response = make(
    "div",
    {
      id: "response",
      class: samples.decoded ? "response" : "response ids",
      role: "listbox",
      "aria-label": "Response, token by token: left and right arrows move",
      "aria-orientation": "horizontal",
      on: {
        mouseover: ({ target }) => target.dataset.place && showToken(Number(target.dataset.place)),
        mouseleave: () => showToken(focused),
        click: ({ target }) => target.dataset.place && focusToken(Number(target.dataset.place)),
        focusin: ({ target }) => target.dataset.place && hold(Number(target.dataset.place)),
        keydown: walk,
      },
    },
    tokens,
  );
  return response;
}

function tokenOf(item, place) {
  const band = bandOf(probabilityOf(item.nats[place]));
  const text = tokenText(item, place);
  const isPart = text === "";
  return make(
    "span",
    {
      class: `token b${band}${isPart ? " part" : ""}`,
      role: "option",
      "aria-selected": "false",
      tabindex: place === 0 ? 0 : -1,
      "data-place": place,
    },
    isPart ? "·" : running(partsOf(item, place)),
  );
}

function gapOf(item) {
  const hidden = `… ${plural(item.gap[1], "token")} not shown here`;
  const command = item.command === null ? [] : ["; all: ", make("code", {}, item.command)];
  return make("p", { class: "gap", role: "presentation" }, hidden, ...command);
}

const nodeOf = (place) => document.querySelector(`#response [data-place="${place}"]`);

/** A token that has the focus is the one that the panel shows, unless the mouse points at another. */
function hold(place) {
  const [before, now] = [nodeOf(focused), nodeOf(place)];
  before.tabIndex = -1;
  before.setAttribute("aria-selected", "false");
  now.tabIndex = 0;
  now.setAttribute("aria-selected", "true");
  now.setAttribute("aria-label", describe(place));
  focused = place;
  showToken(place);
  panel.classList.add("open");
}

const focusToken = (place) => nodeOf(place).focus();

function describe(place) {
  const size = current.sizes[place];
  const text = tokenText(current, place).replaceAll(INVISIBLE, (found) => SIGNS[found]);
  return `${text || "part of a character"}, ${percent(probabilityOf(current.nats[place]))}, ${
    size ? plural(size, "id") : "not truncated"
  }`;
}

function walk(event) {
  const last = current.tokens.length - 1;
  const to = { ArrowLeft: focused - 1, ArrowRight: focused + 1, Home: 0, End: last }[event.key];
  if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  event.stopPropagation();
  focusToken(Math.max(0, Math.min(last, to)));
}

/** The parts of the text of tokens that decode only together with this one; null where it stands for itself. */
function wholeOf(place) {
  const isPart = (at) => at < current.tokens.length && tokenText(current, at) === "";
  let start = place;
  while (start > 0 && isPart(start)) start -= 1;
  return isPart(place) || isPart(place + 1) ? partsOf(current, start) : null;
}

function showToken(place) {
  const item = current;
  const number = item.gap && place >= item.gap[0] ? place + item.gap[1] : place;
  const size = item.sizes[place];
  const whole = wholeOf(place);
  panel.replaceChildren(
    closeButton,
    make("h4", {}, `Token ${count(number)} of 0-${count(item.length - 1)}`),
    make("p", { class: "chosen" }, visible(nameOf(item.tokens[place]))),
    make(
      "p",
      {},
      make("strong", {}, percent(probabilityOf(item.nats[place]))),
      ` likely, ${size ? `${plural(size, "id")} in the support` : "not truncated"}`,
    ),
    whole === null ? "" : make("p", {}, "A part of ", make("span", { class: "name" }, visible(whole))),
    size ? supportTable(item, place) : make("p", {}, `Not truncated: any of the ${count(content.vocab_size)} ids.`),
  );
}

function supportTable(item, place) {
  const [start, stop] = [item.starts[place], item.starts[place + 1]];
  const rows = item.supports.slice(start, stop).map((name, offset) => ({
    name,
    isSampled: offset === 0,
    nats: item.support_nats === null ? (offset ? null : item.nats[place]) : item.support_nats[start + offset],
  }));
  if (item.support_nats !== null) rows.sort((one, other) => one.nats - other.nats);
  const hidden = item.sizes[place] - rows.length;
  const known = item.support_nats !== null;
  const unknown = "Of the other ids no probability is stored (--support-logprobs).";
  return make(
    "div",
    {},
    make(
      "table",
      { class: "support" },
      make("thead", {}, make("tr", {}, ["token", "id", "probability"].map((it) => make("th", { scope: "col" }, it)))),
      make("tbody", {}, rows.map(supportRow)),
    ),
    hidden > 0 ? make("p", { class: "quiet" }, `and ${count(hidden)} more`) : "",
    known || rows.length < 2 ? "" : make("p", { class: "quiet" }, unknown),
  );
}

function supportRow({ name, nats, isSampled }) {
  const probability = nats === null ? null : probabilityOf(nats);
  const bar = make("span", { class: "bar" });
  if (probability !== null) bar.style.width = `${Math.max(1, 100 * probability)}%`;
  return make(
    "tr",
    { class: isSampled ? "sampled" : null },
    make("td", {}, make("span", { class: "name" }, visible(nameOf(name))), isSampled ? " ◂ sampled" : ""),
    make("td", { class: "number" }, String(samples.ids[name])),
    make("td", { class: "number" }, probability === null ? "" : percent(probability), probability === null ? "" : bar),
  );
}
