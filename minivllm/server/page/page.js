// The server and the chat.
const POLL_MS_IDLE = 3000;
const chats = new Chats();
let key = "", models = new Map(), chat = newChat(), answering = null, follows = true;

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
  offerImages();
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

/** An answer without text yet: [element, view, the folded reasoning, the line below]. */
function addAnswer() {
  const thoughts = make("details", "reasoning", make("summary", "", "Reasoning"), make("div"));
  const shown = make("div", "text"), foot = make("p", "figures", "…");
  thoughts.hidden = true;
  return [addMessage("assistant", "Model", thoughts, shown, foot), new MarkdownView(shown), thoughts, foot];
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

async function answer(text, attached = []) {
  const sampling = [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_completion_tokens"]];
  const body = { model: $("model").value || undefined, stream: true, stream_options: { include_usage: true } };
  for (const [id, name] of sampling) if ($(id).value !== "") body[name] = Number($(id).value);
  const mine = chat, before = mine.messages; // another chat may be shown before the answer ends
  const mySaid = { role: "user", content: text, ...(attached.length && { images: attached }) };
  body.messages = [...before, mySaid].map((one) => ({ role: one.role, content: images.contentWith(one) }));
  const question = addMessage("user", "You", ...thumbnails(attached), text), [element, view, thoughts, foot] = addAnswer();
  const start = performance.now();
  let content = "", reasoning = "", unseen = "", frame = null, first = null, usage = null, reason = null;
  /** Keeps what was said so far: an answer, or a question that waits in the composer. */
  const keep = () => {
    const said = { role: "assistant", content, ...(reasoning && { reasoning }) };
    mine.draft = content ? "" : text;
    mine.messages = content ? [...before, mySaid, said] : before;
    if (!mine.isDeleted) chats.keep(mine);
    showChats();
  };
  keep();
  addEventListener("pagehide", keep);
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
        const delta = choice.delta.content || "", thought = choice.delta.reasoning || choice.delta.reasoning_content || "";
        if ((delta || thought) && first === null) first = performance.now();
        if (thought && thoughts.hidden) thoughts.open = !(thoughts.hidden = false);
        if (delta && !content) thoughts.open = false;
        content += delta;
        unseen += delta;
        reasoning += thought;
        if (thought) thoughts.lastChild.append(thought);
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
      if (!content && !$("message").value && !images.next.length) { // so that Enter sends it again
        $("message").value = text;
        images.next.push(...attached);
        showNext();
      }
      if (error.status === 401) askForKey();
    }
  }
  cancelAnimationFrame(frame);
  foot.textContent = [...figures(first, start, usage), ending(reason, usage)].join(" · ");
  show();
  if (!content) question.classList.add("unsent");
  thoughts.open = false;
  removeEventListener("pagehide", keep);
  keep();
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
  if ((!text && !images.next.length) || answering) return;
  $("message").value = "";
  const attached = images.takeNext();
  tellImageProblem("");
  showNext();
  answer(text, attached);
});

// A key of an input method ends a word, not the message. Safari tells of it by the code only.
const isComposing = (event) => event.isComposing || event.keyCode === 229;
const TOUCH = matchMedia("(hover: none) and (pointer: coarse)"); // its keyboard has no Shift-Enter
function adaptToKeyboard() {
  $("message").enterKeyHint = TOUCH.matches ? "enter" : "send";
  const atDesk = "Enter sends, Shift-Enter starts a line, Escape stops an answer.";
  $("hint").textContent = TOUCH.matches ? "Enter starts a line." : atDesk;
}
TOUCH.addEventListener("change", adaptToKeyboard);
adaptToKeyboard();
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !TOUCH.matches && !isComposing(event)) {
    event.preventDefault();
    $("chat-form").requestSubmit();
  }
});
const stop = () => answering && answering.abort();
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => event.key === "Escape" && !isComposing(event) && stop());

// -- conversations -----------------------------------------------------------------------------------------------

function showChats() {
  const kept = chats.all(), isKnown = kept.some((one) => one.id === chat.id);
  const shown = isKnown ? kept : [chat, ...kept];
  $("chats").replaceChildren(...shown.map((one) => new Option(chatTitle(one), one.id)));
  $("chats").value = chat.id;
  $("delete").disabled = !isKnown;
  $("unkept").hidden = chats.isKept;
  history.replaceState(null, "", isKnown ? "#" + chat.id : location.pathname); // so that a reload shows it again
}

/** Another chat in place of the one that is shown; its answer, if it is still being written, ends. */
function openChat(wanted) {
  stop();
  if ($("message").value === chat.draft) $("message").value = "";
  chat = wanted;
  $("message").value ||= chat.draft;
  tellImageProblem("");
  $("log").replaceChildren();
  for (const { role, content, reasoning, images: sent } of chat.messages) {
    if (role === "user") addMessage("user", "You", ...thumbnails(sent), content);
    else {
      const [, view, thoughts, foot] = addAnswer();
      view.add(content);
      thoughts.lastChild.append(reasoning || "");
      thoughts.hidden = !reasoning;
      foot.remove();
    }
  }
  follows = true;
  followLog();
  showChats();
  $("message").focus();
}

$("clear").addEventListener("click", () => openChat(newChat()));
$("chats").addEventListener("change", () => {
  openChat(chats.all().find((one) => one.id === $("chats").value) || newChat());
});

const DELETE = $("delete").textContent;
const resetDelete = () => { $("delete").textContent = DELETE; };
$("delete").addEventListener("blur", resetDelete);
$("delete").addEventListener("click", () => {
  if ($("delete").textContent === DELETE) {
    $("delete").textContent = "Really?";
    return;
  }
  resetDelete();
  chat.isDeleted = true;
  chats.remove(chat);
  openChat(chats.all()[0] || newChat());
});
addEventListener("storage", (event) => event.key === STORED && showChats()); // another window has changed them

// The header may take two lines; chat and header fill a screen.
const head = document.querySelector("header");
new ResizeObserver(() => {
  document.documentElement.style.setProperty("--head", head.offsetHeight + "px");
}).observe(head);

openChat(chats.all().find((one) => "#" + one.id === location.hash) || chats.all()[0] || newChat());
connect();
