// The requests that run or wait, with their progress.
"use strict";

const seconds = (s) => (s === null ? "" : `${s.toFixed(2)} s`);

function showRequests(state) {
  const running = state.running.length - state.queued;
  $("running").textContent = state.running.length ? `${Math.max(running, 0)} running, ${state.queued} waiting` : "no requests";
  fill($("running-table"), state.running.map((r) => [
    String(r.id), r.state, `${r.prompt_done} of ${r.prompt_tokens}`, `${r.generated_tokens} of ${r.max_tokens}`,
    seconds(r.ttft_s), r.tokens_per_s === null ? "" : `${r.tokens_per_s.toFixed(1)} tokens/s`,
  ]));
}

async function refreshRequests() {
  try {
    showRequests(await told("/running"));
  } catch (error) {
    $("running").textContent = `requests: ${error.message}`;
  }
}
