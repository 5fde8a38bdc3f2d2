// Calls of this server; every text that comes back is data and is shown as textContent alone.

export const settings = { key: "", model: "" };

function headers() {
  const base = { "Content-Type": "application/json" };
  return settings.key ? { ...base, Authorization: `Bearer ${settings.key}` } : base;
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refuse(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not OpenAI's error object
  }
  throw new ApiError(response.status, message);
}

export async function get(path) {
  const response = await fetch(path, { headers: headers() });
  return response.ok ? response.json() : refuse(response);
}

export async function post(path, body) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body) });
  return response.ok ? response.json() : refuse(response);
}

export async function metricsText() {
  const response = await fetch("/metrics");
  return response.ok ? response.text() : refuse(response);
}

// Yields the parsed events of a streamed answer.
export async function* stream(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) await refuse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(500, event.error.message);
      yield event;
    }
  }
}
