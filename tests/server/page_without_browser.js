// As much of a browser as the script of the page needs to run in node: elements without layout, a storage, a server.
const listeners = {}, elements = {}, bodies = [];
let refuses = false; // the server answers 429
const CARD = {
  id: "eye", max_model_len: 99, default_sampling_params: {}, input_modalities: ["text", "image"],
  image_limits: {
    max_images: 3, max_file_bytes: 1e6, max_pixels: 1e6, max_side: 1000, max_ratio: 200, max_body_bytes: 4e6,
    media_types: ["image/png"],
  },
};

class Element {
  constructor(name) {
    Object.assign(this, { name, children: [], value: "", textContent: "", hidden: false, dataset: {}, src: "" });
    Object.assign(this, { style: { setProperty() {} }, classList: { toggle() {}, add() {} }, files: [], options: [] });
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  get lastChild() { return this.children.at(-1); }
  get childNodes() { return this.children; }
  addEventListener(kind, listen) { listeners[this.id + " " + kind] = listen; }
  async decode() { Object.assign(this, { naturalWidth: 30, naturalHeight: 20 }); }
  setAttribute() {}
  before() {}
  remove() {}
  focus() {}
}

const globals = {
  document: {
    getElementById: (id) => (elements[id] ??= Object.assign(new Element(), { id })),
    createElement: (name) => new Element(name),
    querySelector: () => new Element(),
    addEventListener() {},
    documentElement: new Element(), body: new Element(), activeElement: null, visibilityState: "hidden",
  },
  localStorage: {
    text: null,
    getItem() { return this.text; },
    setItem(_, text) { this.text = text; },
  },
  FileReader: class {
    readAsDataURL(file) {
      this.result = "data:image/png;base64," + file.data;
      this.onload();
    }
  },
  ResizeObserver: class { observe() {} },
  Option: Element,
  matchMedia: () => ({ matches: false, addEventListener() {} }),
  history: { replaceState() {} },
  location: { hash: "", pathname: "/" },
  addEventListener() {},
  removeEventListener() {},
  requestAnimationFrame: (show) => setTimeout(show, 0),
  cancelAnimationFrame: clearTimeout,
  async fetch(path, options) {
    if (path === "/v1/models") return new Response(JSON.stringify({ data: [CARD] }));
    if (path !== "/v1/chat/completions") return new Response("{}");
    bodies.push(JSON.parse(options.body));
    if (refuses) return new Response("{}", { status: 429 });
    const chunk = { choices: [{ delta: { content: "Hi" }, finish_reason: "stop" }] };
    return new Response("data: " + JSON.stringify(chunk) + "\n\ndata: [DONE]\n\n");
  },
};
for (const [name, value] of Object.entries(globals)) {
  Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
}

/** Waits until a condition holds; fails after 20 s. */
async function until(holds) {
  for (let turn = 0; turn < 4000; turn += 1) {
    if (holds()) return;
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  throw new Error("It never came true: " + holds);
}
