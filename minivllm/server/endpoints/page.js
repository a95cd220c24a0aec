const SAMPLES = 120, POLL_MS = 500, POLL_MS_IDLE = 3000, COLUMNS = 80, ROWS = 24;
const $ = (id) => document.getElementById(id);
let key = "", models = new Map(), messages = [], answering = null, follows = true;
const samples = { running: [], waiting: [], kv: [] }, caughtUp = new Set();
let steps = [], lastStep = 0;

const counted = (number, noun) => number + " " + noun + (number === 1 ? "" : "s");

// -- the server --------------------------------------------------------------------------------------------------

/** A failure in words. status: of the answer, 0 if there was none. code: the server's name for it. */
class Problem extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const GONE = "The server does not answer: it has stopped, or the network is down. Send again when the page says connected.";

async function ask(path, options) {
  const headers = { "content-type": "application/json", ...(key && { authorization: "Bearer " + key }) };
  let response, body = {};
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem(GONE);
  }
  if (response.ok) return response;
  try { body = (await response.json()).error || {}; } catch (_) { /* not in the usual form */ }
  let message = body.message || "The server answered with status " + response.status + ".";
  if (response.status === 429) {
    const seconds = response.headers.get("retry-after");
    message = "The server is full" + (seconds ? ", try again in " + seconds + " s" : "") + ". It says: " + message;
  }
  if (body.code === "context_length_exceeded") message = "This chat has filled the context: start a new chat. " + message;
  throw new Problem(message, response.status, body.code);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      piece = { done: true, error };
    }
    if (piece.error && piece.error.name === "AbortError") throw piece.error;
    if (piece.done) throw new Problem("The server closed the connection before the answer was complete.");
    const frames = (rest + piece.value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function setStatus(text, isBad) {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").classList.toggle("bad", Boolean(isBad));
}

function askForKey() {
  $("key-form").hidden = false;
  $("key-problem").textContent = key ? "The server does not accept this key." : "";
  setStatus("a key is needed", true);
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("key-form").hidden = true;
  $("message").focus();
  connect();
});

async function connect() {
  try {
    const cards = (await (await ask("/v1/models")).json()).data, chosen = $("model").value;
    models = new Map(cards.map((card) => [card.id, card]));
    $("model").replaceChildren(...cards.map((card) => new Option(card.id, card.id)));
    if (models.has(chosen)) $("model").value = chosen;
    showDefaults();
    look();
  } catch (error) {
    if (error.status === 401) askForKey();
    else {
      setStatus("the server does not answer, trying again", true);
      setTimeout(connect, POLL_MS_IDLE);
    }
  }
}

function showDefaults() {
  const card = models.get($("model").value), defaults = card.default_sampling_params;
  $("temperature").placeholder = defaults.temperature;
  $("top-p").placeholder = defaults.top_p;
  const given = Object.entries(defaults).map(([name, value]) => name + " " + value).join(", ");
  $("defaults").textContent = "An empty field leaves the choice to the model: " + given + ".";
}
$("model").addEventListener("change", showDefaults);

// -- chat --------------------------------------------------------------------------------------------------------

function followLog() {
  if (follows) $("log").scrollTop = $("log").scrollHeight;
  $("newest").hidden = follows;
}
$("log").addEventListener("scroll", () => {
  follows = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 24;
  $("newest").hidden = follows;
});
$("newest").addEventListener("click", () => {
  follows = true;
  followLog();
  $("message").focus();
});

function addMessage(kind, name, ...children) {
  const element = make("article", "message " + kind, ...children);
  element.setAttribute("aria-label", name);
  $("log").append(element);
  return element;
}

function figures(first, start, usage) {
  if (first === null) return [];
  const found = ["TTFT " + Math.round(first - start) + " ms"], tokens = usage ? usage.completion_tokens : 0;
  if (tokens > 1) found.push(counted(tokens, "token"), ((tokens - 1) / ((performance.now() - first) / 1000)).toFixed(1) + " tok/s");
  const card = models.get($("model").value);
  if (usage && card) found.push("context " + usage.total_tokens + " of " + card.max_model_len);
  return found;
}

function ending(reason, usage) {
  if (reason !== "length") return reason;
  const card = models.get($("model").value);
  return card && usage && usage.total_tokens >= card.max_model_len
    ? "cut: the context is full, start a new chat" : "cut at the most tokens";
}

async function answer(text) {
  const sampling = [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_completion_tokens"]];
  const body = { model: $("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const [id, name] of sampling) if ($(id).value !== "") body[name] = Number($(id).value);
  const before = messages;
  body.messages = [...before, { role: "user", content: text }];
  const question = addMessage("user", "You", text);
  const reasoning = make("div", "reasoning"), shown = make("div", "text"), foot = make("p", "figures", "…");
  const element = addMessage("assistant", "Model", reasoning, shown, foot), view = new MarkdownView(shown);
  const start = performance.now();
  let content = "", unseen = "", frame = null, first = null, usage = null, reason = null;
  const show = () => {
    frame = null;
    if (unseen) view.add(unseen);
    unseen = "";
    followLog();
  };
  follows = true;
  followLog();
  setAnswering(new AbortController());
  try {
    const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: answering.signal });
    for await (const event of events(response)) {
      if (event.error) throw new Problem(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices) {
        const delta = choice.delta.content || "", thought = choice.delta.reasoning_content || "";
        if ((delta || thought) && first === null) first = performance.now();
        content += delta;
        unseen += delta;
        if (thought) reasoning.append(thought);
        reason = choice.finish_reason || reason;
      }
      frame ??= requestAnimationFrame(show);
    }
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "failed";
    if (reason === "failed") {
      const problem = make("p", "problem", error.message);
      problem.setAttribute("role", "alert");
      foot.before(problem);
      if (!content && !$("message").value) $("message").value = text; // so that Enter sends it again
      if (error.status === 401) askForKey();
    }
  }
  cancelAnimationFrame(frame);
  foot.textContent = [...figures(first, start, usage), ending(reason, usage)].join(" · ");
  show();
  if (!content) question.classList.add("unsent");
  else if (messages === before) messages = [...body.messages, { role: "assistant", content }]; // no new chat meanwhile
  setAnswering(null);
  element.dataset.done = reason;
}

/** While an answer is written, screen readers wait for the whole; then it is theirs, and the input has the focus. */
function setAnswering(controller) {
  answering = controller;
  $("log").setAttribute("aria-busy", String(Boolean(controller)));
  const lostFocus = [document.body, $("send"), $("stop")].includes(document.activeElement);
  $("send").disabled = Boolean(controller);
  $("stop").disabled = !controller;
  if (lostFocus && $("key-form").hidden) $("message").focus();
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || answering) return;
  $("message").value = "";
  answer(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
const stop = () => answering && answering.abort();
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => event.key === "Escape" && !event.isComposing && stop());
$("clear").addEventListener("click", () => {
  stop();
  messages = [];
  $("log").replaceChildren();
  $("newest").hidden = true;
  $("message").focus();
});

// -- watching ----------------------------------------------------------------------------------------------------

async function look() {
  if (document.visibilityState === "visible") {
    try {
      const watched = $("engine").value || "0", live = await (await ask("/live?after=" + lastStep + "&engine=" + watched)).json();
      if (watched === ($("engine").value || "0")) show(live);
      setStatus("connected");
    } catch (error) {
      if (error.status === 401) return askForKey();
      setStatus(error.status === 503 ? "the engine has died" : "the server does not answer, trying again", true);
      return setTimeout(connect, POLL_MS_IDLE);
    }
  }
  setTimeout(look, POLL_MS);
}

function showEngines(engines) {
  const select = $("engine");
  $("engines").hidden = engines.length < 2;
  if (select.length !== engines.length) select.replaceChildren(...engines.map((_, index) => new Option("", index)));
  engines.forEach((one, index) => {
    const state = one.is_up ? one.num_running + " running, " + one.num_waiting + " waiting" : "down";
    if (document.activeElement !== select) select.options[index].text = "Engine " + index + ": " + state;
  });
}
$("engine").addEventListener("change", () => {
  [steps, lastStep] = [[], 0];
  for (const values of Object.values(samples)) values.length = 0;
  $("engine").blur();
});

function showTiers(tiers) {
  const mib = (bytes) => (bytes / 2 ** 20).toFixed(1) + " MiB";
  $("tiers").hidden = $("loading-legend").hidden = !tiers.length;
  $("tiers").replaceChildren(...tiers.map((tier) => {
    const line = document.createElement("li");
    line.textContent = tier.name + ": " + counted(tier.hit_tokens, "token") + " found, " + mib(tier.loaded_bytes) + " loaded, " +
      mib(tier.saved_bytes) + " saved, " + counted(tier.num_failed_blocks, "block") + " failed";
    return line;
  }));
}

function show(live) {
  showEngines(live.engines);
  showTiers(live.tiers);
  if (live.num_steps < lastStep) [steps, lastStep] = [[], 0]; // another server
  for (const [name, value] of [["running", live.num_running], ["waiting", live.num_waiting], ["kv", live.kv_cache_usage]]) {
    samples[name].push(value);
    if (samples[name].length > SAMPLES) samples[name].shift();
    $(name).textContent = name === "kv" ? Math.round(value * 100) + " %" : value;
  }
  for (const step of live.steps) {
    for (const id of step.preempted) caughtUp.delete(id);
    step.decoding = new Set(Object.keys(step.num_scheduled_tokens).filter((id) => caughtUp.has(id)));
    const unfinished = new Set(step.unfinished_prompts);
    for (const id of Object.keys(step.num_scheduled_tokens)) if (!unfinished.has(id)) caughtUp.add(id);
    lastStep = step.step;
  }
  steps = steps.concat(live.steps).slice(-COLUMNS);
  const shown = new Set(steps.flatMap((step) => Object.keys(step.num_scheduled_tokens)));
  for (const id of caughtUp) if (!shown.has(id)) caughtUp.delete(id);
  draw();
}

function draw() {
  for (const name of ["running", "waiting", "kv"]) {
    drawChart($(name + "-chart"), samples[name], name === "kv" ? 1 : Math.max(4, ...samples[name]));
  }
  drawHeat();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function prepare(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width];
}

function drawChart(canvas, values, most) {
  const height = 70, [context, width] = prepare(canvas, height);
  context.fillStyle = colour("--empty");
  context.fillRect(0, 0, width, height);
  const place = (index) => width - (values.length - 1 - index) * width / (SAMPLES - 1);
  const level = (value) => height - 2 - value / most * (height - 8);
  context.beginPath();
  values.forEach((value, index) => context.lineTo(place(index), level(value)));
  context.strokeStyle = colour("--accent");
  context.lineWidth = 2;
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(place(0), height);
  context.globalAlpha = 0.2;
  context.fillStyle = colour("--accent");
  context.fill();
}

function drawHeat() {
  const named = (step) => Object.keys(step.num_scheduled_tokens).concat(step.preempted, step.loading);
  const ids = [...new Set(steps.flatMap(named))];
  const rows = ids.slice(-ROWS), cellHeight = Math.min(24, 240 / Math.max(1, rows.length));
  const [context, width] = prepare($("heat"), cellHeight * Math.max(1, rows.length)), cellWidth = width / COLUMNS;
  const most = Math.max(2, ...steps.flatMap((step) => Object.values(step.num_scheduled_tokens)));
  const colours = { low: colour("--prompt-low"), high: colour("--prompt-high"), decode: colour("--decode"),
    preempted: colour("--preempted"), loading: colour("--loading"), empty: colour("--empty") };
  steps.forEach((step, column) => {
    rows.forEach((id, row) => {
      const box = [column * cellWidth, row * cellHeight, cellWidth - 1, cellHeight - 1];
      const count = step.num_scheduled_tokens[id];
      context.globalAlpha = 1;
      if (step.preempted.includes(id)) context.fillStyle = colours.preempted;
      else if (count === undefined) context.fillStyle = step.loading.includes(id) ? colours.loading : colours.empty;
      else if (step.decoding.has(id)) context.fillStyle = colours.decode;
      else {
        context.fillStyle = colours.low;
        context.fillRect(...box);
        context.globalAlpha = Math.log(count) / Math.log(most);
        context.fillStyle = colours.high;
      }
      context.fillRect(...box);
    });
  });
  if (!steps.length) return;
  const last = steps[steps.length - 1], counts = Object.values(last.num_scheduled_tokens);
  $("heat").dataset.columns = steps.length;
  $("heat").dataset.rows = rows.length;
  $("heat-text").textContent = "A row is a request, a column a step: steps " + steps[0].step + " to " + last.step + ", " +
    (ids.length > ROWS ? "the last " + ROWS + " of " : "") + counted(ids.length, "request") + ". Step " + last.step + " computed " +
    counted(counts.reduce((sum, count) => sum + count, 0), "token") + " for " + counts.length + " of them.";
}

$("message").focus();
connect();
