// Finds elements and words numbers.

const find = (id) => document.getElementById(id);

const signed = (number) => number.toFixed(2).replace("-", "\u2212");

const percent = (share) => (share >= 0.9995 ? "100 %" : share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);
