// The few ways in which this page writes: elements and text, never markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, text = "", classes = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

export function fillTable(table, head, rows) {
  const header = element("tr");
  header.append(...head.map((name) => (name ? Object.assign(element("th", name), { scope: "col" }) : element("td"))));
  const body = rows.map((cells) => {
    const row = element("tr");
    row.append(...cells.map((cell) => {
      if (!(cell instanceof Node)) return element("td", String(cell));
      const made = element("td");
      made.append(cell);
      return made;
    }));
    return row;
  });
  table.replaceChildren(header, ...(body.length ? body : [Object.assign(element("tr"), {})]));
  if (!body.length) table.lastChild.append(element("td", "nothing yet"));
}

export function showTrouble(error) {
  const line = byId("trouble");
  line.hidden = !error;
  line.textContent = error ? error.message : "";
  if (error && error.status === 401) {
    byId("key-row").hidden = false;
    byId("key").focus();
  }
}
