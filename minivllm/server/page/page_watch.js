// The engine as it works: figures of the last minute, and the scheduler's last steps.
const SAMPLES = 120, POLL_MS = 500, COLUMNS = 80, ROWS = 24;
const $ = (id) => document.getElementById(id);
const samples = { running: [], waiting: [], kv: [] }, caughtUp = new Set();
let steps = [], lastStep = 0;

const counted = (number, noun) => number + " " + noun + (number === 1 ? "" : "s");
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
