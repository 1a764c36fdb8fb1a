// Calls of this server, with the key when it wants one.
"use strict";

const $ = (id) => document.getElementById(id);

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function checked(answer) {
  if (answer.ok) return answer;
  if (answer.status === 401) $("key-row").hidden = false;
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answered ${answer.status}`);
}

async function told(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

// A table's rows, as text.
function fill(table, rows) {
  table.tBodies[0].replaceChildren(...rows.map((cells) => {
    const tr = document.createElement("tr");
    for (const cell of cells) tr.insertCell().textContent = cell;
    return tr;
  }));
}
