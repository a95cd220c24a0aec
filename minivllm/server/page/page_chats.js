// Conversations, kept in this browser only. The storage may be off, full, or hold anything: what cannot be read is left
// out, what does not fit costs the oldest conversations their place.
const STORED = "minivllm.chats", MOST_CHATS = 50, MOST_CHARACTERS = 2000000, MOST_TITLE = 60;

/** The storage of this browser. Every access to it may throw. */
const storage = {
  read: () => localStorage.getItem(STORED),
  write: (text) => localStorage.setItem(STORED, text),
};

/** A conversation. messages: {role, content, reasoning, images: numbers of them, see page_images.js}, complete ones only. draft: a question without an answer yet. */
function newChat() {
  const number = crypto.getRandomValues(new Uint32Array(2));
  return { id: number[0].toString(36) + number[1].toString(36), messages: [], draft: "" };
}

const isText = (value) => typeof value === "string";
const isMessage = (one) => Boolean(one) && ["user", "assistant"].includes(one.role) && isText(one.content)
  && (one.reasoning === undefined || isText(one.reasoning))
  && (one.images === undefined || (Array.isArray(one.images) && one.images.every(isText)));
const isChat = (one) => Boolean(one) && isText(one.id) && isText(one.draft) && Array.isArray(one.messages)
  && one.messages.every(isMessage);

function chatTitle(chat) {
  const [{ content, images = [] } = { content: chat.draft }] = chat.messages;
  const first = content.replace(/\s+/g, " ").trim() || (images.length ? counted(images.length, "image") : "New chat");
  return first.length > MOST_TITLE ? first.slice(0, MOST_TITLE - 1) + "…" : first;
}

/** All conversations, the last changed one first. */
class Chats {
  constructor() {
    this.known = []; // all there is where the storage gives nothing
    this.isKept = true;
  }

  all() {
    let text = null;
    if (!this.isKept) return this.known;
    try {
      text = storage.read();
    } catch (_) {
      return this.known;
    }
    try {
      const found = JSON.parse(text);
      this.known = Array.isArray(found) ? found.filter(isChat) : [];
    } catch (_) {
      this.known = [];
    }
    return this.known;
  }

  keep(chat) { this.replace(chat.id, [chat]); }

  remove(chat) { this.replace(chat.id, []); }

  /** Other windows write too, so the others are read anew. */
  replace(id, chats) {
    const wanted = [...chats, ...this.all().filter((one) => one.id !== id)];
    const texts = wanted.map((one) => JSON.stringify(one));
    let count = 0, size = 0;
    while (count < Math.min(texts.length, MOST_CHATS) && (size += texts[count].length + 1) <= MOST_CHARACTERS) count += 1;
    this.isKept = false;
    for (; !this.isKept && (count > 0 || !texts.length); count -= 1) {
      try {
        storage.write("[" + texts.slice(0, count).join(",") + "]");
        this.isKept = true;
      } catch (_) {
        if (!count) break;
      }
    }
    this.known = wanted.slice(0, MOST_CHATS);
  }
}
