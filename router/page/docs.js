// The OpenAPI document as a page: a section per endpoint, with its example to send, and one per schema.

import { ApiError, get, settings } from "/page/api.js";
import { byId, element, fillTable, showTrouble } from "/page/dom.js";

const nameOf = (ref) => ref.split("/").pop();

function section(title, id = "") {
  const made = element("details");
  made.append(element("summary", title));
  if (id) made.id = id;
  return made;
}

function link(name) {
  const made = element("a", name);
  made.href = `#schema-${name}`;
  return made;
}

// A schema in one line: links to the schemas it refers to, and its own limits in words.
function line(schema) {
  const made = element("span");
  if (schema.$ref) made.append(link(nameOf(schema.$ref)));
  else if (schema.anyOf || schema.oneOf) (schema.anyOf || schema.oneOf).forEach((part, rank) => made.append(rank ? " or " : "", line(part)));
  else if (schema.type === "array" && schema.items) made.append("list of ", line(schema.items));
  else if (schema.enum) made.append(schema.enum.map((value) => JSON.stringify(value)).join(", "));
  else if ("const" in schema) made.append(JSON.stringify(schema.const));
  else made.append(schema.type || "anything");
  const limits = ["minimum", "exclusiveMinimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern"];
  const said = limits.filter((name) => name in schema).map((name) => `${name} ${schema[name]}`);
  if (said.length) made.append(` (${said.join(", ")})`);
  return made;
}

function fields(schema) {
  const made = element("div");
  if (schema.description) made.append(element("p", schema.description, "note"));
  if (!schema.properties) {
    made.append(line(schema));
    return made;
  }
  const table = element("table");
  const required = new Set(schema.required || []);
  fillTable(table, ["field", "", "type"], Object.entries(schema.properties).map(([name, each]) => [name, required.has(name) ? "required" : "", line(each)]));
  made.append(table);
  return made;
}

async function send(path, method, body, output) {
  output.textContent = "…";
  const headers = body === null ? {} : { "Content-Type": "application/json" };
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  try {
    const answer = await fetch(path, { method, headers, body });
    const text = await answer.text();
    let shown = text;
    try {
      shown = JSON.stringify(JSON.parse(text), null, 2);
    } catch {
      // text, or the events of a stream
    }
    output.textContent = `${answer.status} ${answer.statusText}\n${shown}`;
  } catch (error) {
    output.textContent = error.message;
  }
}

function trial(path, method, example) {
  const form = element("form");
  let text = null;
  if (example !== undefined) {
    const label = element("label", "Body", "wide");
    text = element("textarea");
    text.rows = 5;
    text.value = JSON.stringify(example, null, 2);
    label.append(text);
    form.append(label);
  }
  const output = Object.assign(element("pre", "", "text"), { hidden: true, tabIndex: 0 });
  form.append(Object.assign(element("button", "Send"), { type: "submit" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    output.hidden = false;
    send(path, method, text && text.value, output);
  });
  return [form, output];
}

function endpoint(path, method, operation) {
  const made = section(`${method.toUpperCase()} ${path}: ${operation.summary}`, operation.operationId);
  if (operation.requestBody) {
    const body = operation.requestBody.content["application/json"];
    made.append(element("h3", "Request"), line(body.schema), ...trial(path, method.toUpperCase(), body.example));
  } else if (!operation.parameters) made.append(...trial(path, method.toUpperCase()));
  made.append(element("h3", "Answer"));
  for (const [status, answer] of Object.entries(operation.responses)) {
    for (const [type, content] of Object.entries(answer.content)) {
      const row = element("p", `${status} ${type}: `);
      row.append(line(content.schema));
      made.append(row);
    }
  }
  return made;
}

function openTarget() {
  const target = location.hash && byId(location.hash.slice(1));
  if (!target) return;
  target.open = true;
  target.scrollIntoView();
}

async function show() {
  const answer = await get("/openapi.json");
  if (!answer.paths) throw new ApiError(0, "The server sent no OpenAPI document.");
  const endpoints = Object.entries(answer.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => endpoint(path, method, operation)));
  byId("endpoints").replaceChildren(...endpoints);
  const schemas = Object.entries(answer.components.schemas).map(([name, schema]) => {
    const made = section(name, `schema-${name}`);
    made.append(fields(schema));
    return made;
  });
  byId("schemas").replaceChildren(...schemas);
  openTarget();
}

byId("key").addEventListener("input", (event) => { settings.key = event.target.value; });
addEventListener("hashchange", openTarget);
show().catch(showTrouble);
