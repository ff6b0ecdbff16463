// Scales of charts, and where their axes have ticks.

// Values at round distances, about `most` of them.
function linearTicks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((digit) => digit * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) found.push(index * step || 0);
  return found;
}

// Powers of ten and round values between them, as few as fit.
function logTicks(low, high, most) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const within = (values) => values.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  const powers = Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
  for (const digits of [[1, 2, 5], [1, 3], [1]]) {
    const found = within(powers.flatMap((power) => digits.map((digit) => digit * power)));
    if (found.length <= most && found.length > 1) return found;
  }
  const found = within(powers);
  if (found.length > 1) return found.filter((_, index) => index % Math.ceil(found.length / most) === 0);
  return linearTicks(low, high, most).filter((value) => value > 0);
}

// Values at round distances in a number system with another unit, such as 1024 bytes.
function unitTicks(low, high, most, base) {
  const size = base ** Math.max(0, Math.floor(Math.log(Math.max(high, 1)) / Math.log(base)));
  return linearTicks(low / size, high / size, most).map((value) => value * size);
}

class Scale {
  // low and high are mapped to `from` and `to` pixels.
  constructor(low, high, from, to, isLog = false) {
    Object.assign(this, { low, high, from, to, isLog });
  }

  static position(value, isLog) {
    return isLog ? Math.log(value) : value;
  }

  at(value) {
    const [low, high, place] = [this.low, this.high, value].map((one) => Scale.position(one, this.isLog));
    return this.from + ((place - low) / (high - low || 1)) * (this.to - this.from);
  }

  // The value at a pixel of a linear scale.
  value(pixel) {
    return this.low + ((pixel - this.from) / (this.to - this.from || 1)) * (this.high - this.low);
  }

  ticks(most, base) {
    if (base && !this.isLog) return unitTicks(this.low, this.high, most, base);
    return this.isLog ? logTicks(this.low, this.high, most) : linearTicks(this.low, this.high, most);
  }
}

// The scale of an axis that shows all values with some space around them.
function valueScale(values, from, to, isLog, fromZero) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (!values.length) [low, high] = [0, 1];
  if (isLog) return low === high ? new Scale(low / 2, high * 2, from, to, true) : new Scale(low / (high / low) ** 0.04, high * (high / low) ** 0.04, from, to, true);
  if (fromZero) low = Math.min(0, low);
  const space = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return new Scale(fromZero && low === 0 ? 0 : low - space, high + space, from, to);
}

// A step on an axis: 500, 1,500, 20k, 1.5M.
function stepTick(value) {
  const size = Math.abs(value);
  if (size >= 999500) return `${digits(value / 1e6)}M`;
  return size >= 9999.5 ? `${digits(value / 1e3)}k` : count(Math.round(value));
}

// A share on an axis, without the digits that tell values apart.
const percentTick = (value) => `${digits(value * 100)} %`;

// A number in little space: 0.0012, 35, 4.1k, 2e-6.
function compact(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(size < 1e-5 ? 1 : 2).replace(/\.?0+e/, "e").replace("e-", "e−");
  if (size >= 999500) return scaled(value, 1000, ["", "k", "M", "G", "T"]).replace(" ", "");
  return size >= 9999.5 ? `${digits(value / 1000)}k` : digits(value);
}
