// The chat page: messages go to /v1/chat/completions, tokens are shown as they come, with the time to the first and tokens/s.
"use strict";

const messages = [];
let model = "";
let running = null; // AbortController of the answer that is being written

function paragraph(kind, text) {
  const p = document.createElement("p");
  p.className = kind;
  p.textContent = text;
  $("talk").append(p);
  p.scrollIntoView({ block: "end" });
  return p;
}

// What the model thinks before it answers: above the answer, open until that begins.
function thoughts(p) {
  const box = document.createElement("details"), title = document.createElement("summary"), text = document.createElement("p");
  box.className = "reasoning";
  box.open = true;
  title.textContent = "Reasoning";
  box.append(title, text);
  p.before(box);
  return box;
}

// The data of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function answer(text) {
  messages.push({ role: "user", content: text });
  paragraph("user", text);
  const p = paragraph("assistant", "");
  const began = performance.now();
  let first = 0, n = 0, reply = "", box = null;
  running = new AbortController();
  $("stop").hidden = false;
  $("send").disabled = true;
  try {
    if (!model) await findModel();
    const body = {
      model, messages, stream: true, stream_options: { include_usage: true },
      temperature: Number($("temperature").value), max_tokens: Number($("tokens").value),
    };
    const got = await checked(await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    }));
    for await (const data of events(got.body)) {
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) n = chunk.usage.completion_tokens;
      const delta = chunk.choices[0]?.delta ?? {};
      if (!delta.content && !delta.reasoning_content) continue;
      if (!first) first = performance.now();
      n += 1;
      if (delta.reasoning_content) {
        box ??= thoughts(p);
        box.lastChild.append(delta.reasoning_content);
      }
      if (delta.content) {
        if (box && !reply) box.open = false;
        reply += delta.content;
        p.textContent = reply;
      }
      p.scrollIntoView({ block: "end" });
      show(began, first, n);
    }
    show(began, first, n);
  } catch (error) {
    if (error.name !== "AbortError") paragraph("error", error.message);
  } finally {
    running = null;
    $("stop").hidden = true;
    $("send").disabled = false;
    refresh();
    if (reply) messages.push({ role: "assistant", content: reply });
    else messages.pop();
  }
}

function show(began, first, n) {
  if (!first) return;
  const seconds = (performance.now() - first) / 1000;
  const speed = n > 1 && seconds > 0 ? `, ${((n - 1) / seconds).toFixed(1)} tokens/s` : "";
  $("speed").textContent = `first token after ${((first - began) / 1000).toFixed(2)} s, ${n} tokens${speed}`;
}

async function findModel() {
  const list = await (await checked(await fetch("/v1/models", { headers: headers() }))).json();
  model = list.data[0].id;
  $("model").textContent = `${model}, ${list.data[0].context_length} tokens of context`;
}

// What needs a key is not asked for before there is one.
async function begin() {
  try {
    const health = await (await fetch("/health")).json();
    if (health.needs_key && !$("key").value) {
      $("key-row").hidden = false;
      return;
    }
    await findModel();
    $("key-row").hidden = true;
    $("key-trouble").textContent = "";
    refresh();
  } catch (error) {
    $("key-trouble").textContent = error.message;
  }
}

function refresh() {
  if (!model) return;
  refreshRequests();
  if ($("timeline-box").open) refreshTimeline();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  answer(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("talk").replaceChildren();
});
$("key").addEventListener("change", begin);
$("timeline-box").addEventListener("toggle", refresh);
begin();
setInterval(() => document.hidden || refresh(), 1000);
