// The prefix cache as a tree. What others have written comes here as text, and becomes text nodes only.
const TREE_NODES = 60, TREE_MS = 2000, MOST_NODE_CHARACTERS = 160;

async function lookAtTree() {
  if (document.visibilityState === "visible" && $("status").textContent === "connected") {
    try {
      const watched = $("engine").value || "0";
      showTree(await (await ask("/live/tree?limit=" + TREE_NODES + "&engine=" + watched)).json());
    } catch (error) {
      // look() sees the same, and says so.
    }
  }
  setTimeout(lookAtTree, TREE_MS);
}

function describeAge(seconds) {
  if (seconds < 60) return Math.round(seconds) + " s";
  return seconds < 3600 ? Math.round(seconds / 60) + " min" : Math.round(seconds / 3600) + " h";
}

function describeBytes(bytes) {
  return bytes < 2 ** 20 ? (bytes / 2 ** 10).toFixed(1) + " KiB" : (bytes / 2 ** 20).toFixed(1) + " MiB";
}

function treeItem(node) {
  const item = document.createElement("li"), facts = document.createElement("span");
  if (node.text !== null) {
    const text = document.createElement("span"), line = node.text.replace(/\s+/g, " ");
    text.className = "text";
    text.dir = "auto";
    text.textContent = line.length > MOST_NODE_CHARACTERS ? line.slice(0, MOST_NODE_CHARACTERS) + "…" : line;
    item.append(text);
  }
  facts.className = "facts";
  facts.textContent = counted(node.num_tokens, "token") + ", " + describeBytes(node.num_bytes) + ", " +
    (node.users ? counted(node.users, "request") : "unused for " + describeAge(node.age)) +
    (node.is_plain || node.depth ? "" : ", with a salt or an adapter, or continues what is not listed");
  item.className = node.users ? "used" : "";
  item.append(facts);
  return item;
}

function showTree(tree) {
  const root = document.createElement("ul"), open = [root]; // open[depth]: the list that nodes of this depth join
  for (const node of tree.nodes) {
    const item = treeItem(node);
    if (!open[node.depth]) open[node.depth] = open[node.depth - 1].lastElementChild.appendChild(document.createElement("ul"));
    open[node.depth].append(item);
    open.length = node.depth + 1;
  }
  $("tree").replaceChildren(...root.children);
  $("tree").dataset.nodes = tree.nodes.length;
  const left = tree.num_blocks_left_out;
  $("tree-text").textContent = !tree.nodes.length ? "Nothing is cached, or this model keeps no tree." :
    "A line is a run of tokens without a branch; ● is in use." + (left ? " " + counted(left, "block") + " not shown." : "") +
    (tree.shows_texts ? "" : " The server was started without --show-cached-texts.");
}
lookAtTree();
