// Parses Prometheus text to a list of { name, labels, value }.

export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    samples.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return samples;
}

// The samples of a family; a counter is found with or without `_total`.
export function samplesOf(samples, name) {
  const plain = samples.filter((sample) => sample.name === name);
  return plain.length ? plain : samples.filter((sample) => sample.name === `${name}_total`);
}

export const sum = (samples, name) => samplesOf(samples, name).reduce((total, { value }) => total + value, 0);

export function sumBy(samples, name, label) {
  const sums = new Map();
  for (const { labels, value } of samplesOf(samples, name)) sums.set(labels[label] ?? "", (sums.get(labels[label] ?? "") || 0) + value);
  return sums;
}
