// The last prefill's layers as an SVG: a lane per device and kind of work, a bar per span, a colour per layer in turn.
"use strict";

const SVG = document.getElementById("timeline").namespaceURI;
const WIDTH = 900, LANE = 20, GAP = 6, LEFT = 140, TOP = 8;

function drawn(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// A round distance that gives up to ten ticks.
function tickOf(ms) {
  for (let tick = 0.001; ; tick *= 10) {
    for (const factor of [1, 2, 5]) if (ms / (tick * factor) <= 10) return tick * factor;
  }
}

function described(lane, bar) {
  const parts = [`${lane.device} ${lane.lane}`, bar.layer, `${(bar.end_ms - bar.begin_ms).toFixed(3)} ms from ${bar.begin_ms.toFixed(3)} ms`];
  if (bar.what !== "layer") parts.splice(2, 0, bar.n > 1 ? `${bar.n} x ${bar.what}` : bar.what);
  if (bar.rows) parts.push(`${bar.rows} ${bar.what === "share" ? "experts" : "rows"}`);
  if (bar.bytes) parts.push(`${(bar.bytes / 1e6).toFixed(2)} MB`);
  return parts.join(", ");
}

function colourOf(layer) {
  const number = Number(layer.match(/\d+$/)?.[0] ?? 0);
  return `layer-${number % 4}`;
}

function drawTimeline(timeline) {
  const svg = $("timeline");
  const bottom = TOP + timeline.lanes.length * (LANE + GAP);
  const scale = (WIDTH - LEFT - 30) / Math.max(timeline.milliseconds, 1e-6);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${bottom + 20}`);
  svg.setAttribute("width", WIDTH);
  const tick = tickOf(timeline.milliseconds);
  for (let i = 0; i * tick <= timeline.milliseconds; i++) {
    const x = LEFT + i * tick * scale;
    svg.append(drawn("line", { x1: x, x2: x, y1: TOP, y2: bottom }));
    svg.append(drawn("text", { x, y: bottom + 14, "text-anchor": "middle" }, `${Number((i * tick).toPrecision(4))} ms`));
  }
  timeline.lanes.forEach((lane, i) => {
    const y = TOP + i * (LANE + GAP);
    svg.append(drawn("text", { x: 0, y: y + 14 }, `${lane.device} ${lane.lane} ${Math.round(100 * lane.busy)} %`));
    for (const bar of lane.bars) {
      const pale = bar.what === "expert ahead" || bar.what === "inputs" ? " pale" : "";
      const rect = drawn("rect", {
        x: LEFT + bar.begin_ms * scale, y, width: Math.max((bar.end_ms - bar.begin_ms) * scale, 0.5), height: LANE,
        class: colourOf(bar.layer) + pale,
      });
      rect.append(drawn("title", {}, described(lane, bar)));
      rect.addEventListener("pointerenter", () => { $("timeline-bar").textContent = described(lane, bar); });
      svg.append(rect);
    }
  });
}

function showTimeline(timeline) {
  const there = timeline.lanes.length > 0;
  for (const id of ["timeline-scroll", "timeline-table", "timeline-bar"]) $(id).hidden = !there;
  $("timeline-why").textContent = timeline.why ?? "Pale: activations, and experts that arrive before their layer begins.";
  if (!there) return;
  const passes = timeline.passes.length;
  const title = `Layers of the last prefill: ${timeline.tokens} tokens in ${timeline.milliseconds.toFixed(1)} ms, ${passes} ` +
    `batch${passes > 1 ? "es" : ""} of ${timeline.passes[passes - 1].layers} layers`;
  $("timeline-title").textContent = title;
  $("timeline").setAttribute("aria-label", `${title}. The table below has its lanes.`);
  drawTimeline(timeline);
  fill($("timeline-table"), timeline.lanes.map((lane) => [
    lane.device, lane.lane, `${Math.round(100 * lane.busy)} %`, String(lane.bars.reduce((n, bar) => n + bar.n, 0)),
  ]));
}

async function refreshTimeline() {
  try {
    showTimeline(await told("/timeline"));
  } catch (error) {
    $("timeline-why").textContent = `no timeline: ${error.message}`;
  }
}
