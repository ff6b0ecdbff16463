// Formats numbers with units.

const MISSING = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// Three significant digits without an exponent.
function digits(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  const places = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(size))));
  return value.toLocaleString("en-US", { minimumFractionDigits: 0, maximumFractionDigits: places });
}

function scaled(value, base, units) {
  if (!isNumber(value)) return MISSING;
  let index = 0;
  let rest = value;
  // A number that rounds up to the next unit is shown in that unit.
  while (Math.abs(rest) >= base * 0.9995 && index < units.length - 1) {
    rest /= base;
    index += 1;
  }
  return units[index] ? `${digits(rest)} ${units[index]}` : digits(rest);
}

const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const flops = (value) => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
const count = (value) => (isNumber(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 2 }) : MISSING);

function large(value) {
  if (isNumber(value) && Math.abs(value) < 999500) return Math.abs(value) < 100 ? digits(value) : count(Math.round(value));
  return scaled(value, 1000, ["", "thousand", "million", "billion", "trillion", "quadrillion"]);
}

function seconds(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.9995e-6) return `${digits(value * 1e9)} ns`;
  if (size < 0.9995e-3) return `${digits(value * 1e6)} µs`;
  if (size < 0.9995) return `${digits(value * 1e3)} ms`;
  return `${digits(value)} s`;
}

function share(value) {
  if (!isNumber(value)) return MISSING;
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return `${(value * 100).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} %`;
}

function money(value, currency) {
  if (!isNumber(value)) return MISSING;
  const amount = value.toLocaleString("en-US", { maximumFractionDigits: value < 100 ? 2 : 0 });
  return currency ? `${amount} ${currency}` : amount;
}

function shape(dimensions) {
  return (dimensions || []).length ? dimensions.map(count).join(" × ") : "scalar";
}

const sum = (values) => values.reduce((total, value) => total + (isNumber(value) ? value : 0), 0);
