"use strict";
// The page of a dataset, made from the JSON in #content. Its parts, one script in this order:
//
//     dom.js      elements and numbers          charts.js   figures and theme
//     sample.js   one sample, token by token    browser.js  the list of samples, filter, keys
//     report.js   the page
//
// All text is put into text nodes (`make`), whatever it holds: nothing is ever parsed as HTML. Attributes with data in
// them are labels for screen readers only. Nothing is stored, and nothing is asked of a network.

const content = JSON.parse(document.getElementById("content").textContent);
const root = document.documentElement;

/** An element with these attributes (listeners under `on`) and children; strings become text, null nothing. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (value !== null && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

const count = (number) => (number + 0).toLocaleString("en"); // + 0: of 0 no "-0"
/** Of a value of any size six digits: 0.0004, 1e+38. */
const significant = (number) => String(Number(number.toPrecision(6)));
/** To so many decimals; a logprob may have 38 digits before them. */
const rounded = (number, digits) =>
  Math.abs(number) >= 1e15
    ? significant(number)
    : (Number(number.toFixed(digits)) + 0).toLocaleString("en", { maximumFractionDigits: digits });
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
