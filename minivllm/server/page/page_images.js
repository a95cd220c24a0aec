// Images that go with the next message. They stay in this window: what browsers keep of a chat has room for texts only.
const MIB = 2 ** 20, ROOM_FOR_TEXT = 65536;

/** Why an image cannot be sent, in a sentence, or "". name: of the file. card: of the model. bytes, width, height: of the
 * image; 0 by 0 pixels while they are not known. sent: {count, characters} of the images that go with it, in data URLs. */
function imageProblem(name, card, type, bytes, width, height, sent) {
  if (!card) return "The page does not know the model yet: add images when it says connected.";
  const limits = card.image_limits;
  if (!limits) return card.id + " reads text only: it takes no images.";
  const most = limits.max_images, room = limits.max_body_bytes - ROOM_FOR_TEXT;
  if (!limits.media_types.includes(type)) {
    return name + " is no file of the formats " + limits.media_types.map((one) => one.replace("image/", "").toUpperCase()).join(", ") + ".";
  }
  if (bytes > limits.max_file_bytes) {
    return name + " has " + (bytes / MIB).toFixed(1) + " MiB, but may have at most " + limits.max_file_bytes / MIB + ".";
  }
  if (sent.count >= most) return name + " is one image too many: a chat takes at most " + most + ", start a new one.";
  if (sent.characters + Math.ceil(bytes / 3) * 4 > room) {
    return name + " is too large: all images of a chat together may have about " + Math.floor(room * 3 / 4 / MIB) + " MiB.";
  }
  const size = name + " has " + width + " × " + height + " pixels", long = Math.max(width, height);
  if (long > limits.max_side) return size + ", but a side may have at most " + limits.max_side + ".";
  if (width * height > limits.max_pixels) return size + ", but may have at most " + limits.max_pixels + " in all.";
  if (long > limits.max_ratio * Math.min(width, height)) {
    return size + ", but one side may be at most " + limits.max_ratio + " times as long as the other.";
  }
  return "";
}

/** The content of a message as the server takes it: its text, or parts if there are images. gone: how many more there
 * were, which the model is told of: an answer may be about them. */
function contentOf(text, urls, gone = 0) {
  const said = [gone && `[${counted(gone, "image")}, no longer here]`, text].filter(Boolean).join("\n");
  if (!urls.length) return said;
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return said ? [...images, { type: "text", text: said }] : images;
}

/** Images of this window, by their numbers, which is all that a kept chat has of them. */
class Images {
  constructor() {
    this.urls = new Map();
    this.next = []; // numbers of those that go with the next message
  }

  add(url) {
    const number = crypto.getRandomValues(new Uint32Array(2)).join("-");
    this.urls.set(number, url);
    this.next.push(number);
  }

  /** Those that are still here. */
  found(numbers) { return (numbers || []).filter((number) => this.urls.has(number)).map((number) => this.urls.get(number)); }

  /** The content of a message of a chat as the server takes it. */
  contentWith({ content, images: numbers }) {
    const urls = this.found(numbers);
    return contentOf(content, urls, (numbers || []).length - urls.length);
  }

  takeNext() { return this.next.splice(0); }

  /** How many images a chat has and how long they are, those of the next message included. */
  sentWith(messages) {
    const urls = this.found([...messages.flatMap((one) => one.images || []), ...this.next]);
    return { count: urls.length, characters: urls.reduce((sum, url) => sum + url.length, 0) };
  }
}

const images = new Images();
const readUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

function thumbnail(url) {
  const image = make("img", "thumbnail");
  image.alt = "Image";
  image.src = url;
  return image;
}

/** What a message shows of its images; those of an earlier visit are gone. */
function thumbnails(numbers) {
  const urls = images.found(numbers), gone = (numbers || []).length - urls.length;
  const shown = urls.map(thumbnail);
  if (gone) shown.push(make("p", "figures", counted(gone, "image") + " sent, no longer here"));
  return shown;
}

const cardNow = () => models.get($("model").value);

function offerImages() {
  const card = cardNow();
  $("attach").hidden = !(card && card.input_modalities.includes("image"));
}

function tellImageProblem(text) { $("image-problem").textContent = text; }

function showNext() {
  $("next-images").replaceChildren(...images.next.map((number) => {
    const button = make("button", "", "Remove");
    button.type = "button";
    button.addEventListener("click", () => {
      images.next = images.next.filter((one) => one !== number);
      images.urls.delete(number);
      showNext();
      $("message").focus();
    });
    return make("li", "", thumbnail(images.urls.get(number)), button);
  }));
}

/** Takes files that were pasted, dropped or chosen; the first one that cannot be sent is told of. */
async function takeFiles(files) {
  tellImageProblem("");
  for (const file of files) {
    const name = file.name || "The image", card = cardNow();
    let problem = imageProblem(name, card, file.type, file.size, 0, 0, images.sentWith(chat.messages));
    if (!problem) {
      try {
        const url = await readUrl(file), image = thumbnail(url);
        await image.decode();
        const sent = images.sentWith(chat.messages); // others may have come meanwhile
        problem = imageProblem(name, card, file.type, file.size, image.naturalWidth, image.naturalHeight, sent);
        if (!problem) images.add(url);
      } catch (_) {
        problem = name + " cannot be read as an image.";
      }
    }
    if (problem) return tellImageProblem(problem);
    showNext();
  }
}

$("message").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files];
  if (!files.length || event.clipboardData.getData("text/plain")) return; // office programs add a picture to their text
  event.preventDefault();
  takeFiles(files);
});
const bringsFiles = (event) => event.dataTransfer && event.dataTransfer.types.includes("Files");
$("chat").addEventListener("dragover", (event) => bringsFiles(event) && event.preventDefault());
$("chat").addEventListener("drop", (event) => {
  if (!bringsFiles(event)) return;
  event.preventDefault();
  takeFiles([...event.dataTransfer.files]);
});
$("files").addEventListener("change", () => {
  takeFiles([...$("files").files]);
  $("files").value = "";
});
