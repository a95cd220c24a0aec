// LaTeX's mathematics as MathML, which browsers draw themselves. A formula with anything unknown in it is refused whole,
// and the page shows its source instead. Its text only ever becomes text nodes, and no command sets an attribute from it.
const MOST_MATH = 5000, MOST_NESTING = 40;
const split = (text) => text.trim().split(/\s+/);
/** "name character name character …" as a Map. */
const pairs = (text) => new Map(split(text).flatMap((one, place, all) => (place % 2 ? [] : [[one, all[place + 1]]])));

const LETTERS = pairs(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
  lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ
  psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω ell ℓ hbar ℏ imath ı
  jmath ȷ Re ℜ Im ℑ aleph ℵ infty ∞ partial ∂ nabla ∇ emptyset ∅ varnothing ∅ top ⊤ bot ⊥ angle ∠ triangle △ square □
  Box □ blacksquare ■ degree ° prime ′ dagger † ddagger ‡ checkmark ✓ S § % % $ $ & & # # _ _`);
const OPERATORS = pairs(`times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙
  wedge ∧ land ∧ vee ∨ lor ∨ lnot ¬ neg ¬ cap ∩ cup ∪ setminus ∖ forall ∀ exists ∃ nexists ∄ le ≤ leq ≤ ge ≥ geq ≥
  leqslant ⩽ geqslant ⩾ ne ≠ neq ≠ ll ≪ gg ≫ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅ propto ∝ triangleq ≜ doteq ≐ in ∈
  notin ∉ ni ∋ subset ⊂ subseteq ⊆ subsetneq ⊊ supset ⊃ supseteq ⊇ mid ∣ nmid ∤ parallel ∥ perp ⟂ models ⊨ vdash ⊢
  prec ≺ succ ≻ preceq ⪯ succeq ⪰ to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐
  Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ mapsto ↦ hookrightarrow ↪
  uparrow ↑ downarrow ↓ Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌ ldots … dots …
  cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ colon : coloneqq ≔ therefore ∴ because ∵ lt < gt > backslash \\`);
/** Their limits stand above and below; those of INTEGRALS at the side. */
const SUMS = pairs(`sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆`);
const INTEGRALS = pairs("int ∫ iint ∬ iiint ∭ oint ∮");
const LIMITS = new Set(split("lim max min sup inf det gcd Pr argmax argmin limsup liminf"));
const FUNCTIONS = new Set(split(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim
  hom ker`));
const FENCES = pairs(`( ( ) ) [ [ ] ] | | / / < ⟨ > ⟩ { { } } Vert ‖ vert | lvert | rvert | lVert ‖ rVert ‖ langle ⟨
  rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } lbrack [ rbrack ] uparrow ↑ downarrow ↓ backslash \\`)
  .set(".", "").set("\\|", "‖").set("\\{", "{").set("\\}", "}");
const ACCENTS = pairs(`hat ^ bar ¯ widehat ^ bar ¯ overline ¯ vec → overrightarrow → overleftarrow ← dot ˙ ddot ¨ tilde ~
  widetilde ~ check ˇ breve ˘ acute ´ grave \` mathring ˚ overbrace ⏞`);
const UNDER = pairs("underline _ underbrace ⏟");
const SPACES = new Map([[",", 0.167], [":", 0.222], [">", 0.222], [";", 0.278], ["!", -0.167], [" ", 0.25], ["quad", 1],
  ["qquad", 2], ["enspace", 0.5], ["thinspace", 0.167]]);
const SIZES = new Set("big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm".split(" "));
const TEXTS = new Set("text textrm textit textbf textsf texttt textnormal mbox mathrm operatorname mathit".split(" "));
/** Where a variant's A, a and 0 are in Unicode, and the letters that were there before it. */
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce], bm: [0x1d468, 0x1d482, 0x1d7ce],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, "CℂHℍNℕPℙQℚRℝZℤ"], mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6], mathfrak: [0x1d504, 0x1d51e, 0, "CℭHℌIℑRℜZℨ"],
  mathcal: [0x1d49c, 0x1d4b6, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"], mathscr: [0x1d49c, 0x1d4b6, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"],
};
/** Environments: [fence before, fence after, side of the columns]. */
const TABLES = {
  matrix: ["", "", "center"], smallmatrix: ["", "", "center"], pmatrix: ["(", ")", "center"], bmatrix: ["[", "]", "center"],
  Bmatrix: ["{", "}", "center"], vmatrix: ["|", "|", "center"], Vmatrix: ["‖", "‖", "center"], array: ["", "", "center"],
  cases: ["{", "", "left"], aligned: ["", "", "pairs"], align: ["", "", "pairs"], "align*": ["", "", "pairs"],
  split: ["", "", "pairs"],
  alignedat: ["", "", "pairs"], gathered: ["", "", "center"], "gather*": ["", "", "center"],
  gather: ["", "", "center"], equation: ["", "", "center"], "equation*": ["", "", "center"],
};

function mathElement(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/1998/Math/MathML", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
const row = (nodes) => (nodes.length === 1 ? nodes[0] : mathElement("mrow", {}, ...nodes));
const operator = (text, attributes = {}) => mathElement("mo", attributes, text);
const space = (width) => mathElement("mspace", { width: width + "em" });

function inAlphabet(name, character) {
  const [upper, lower, digit, exceptions = ""] = ALPHABETS[name], place = exceptions.indexOf(character);
  const moved = (start, first) => String.fromCodePoint(start + character.charCodeAt(0) - first.charCodeAt(0));
  if (place >= 0 && /[A-Za-z]/.test(character)) return exceptions[place + 1];
  if (/[A-Z]/.test(character)) return moved(upper, "A");
  if (/[a-z]/.test(character)) return moved(lower, "a");
  return digit && /\d/.test(character) ? moved(digit, "0") : character;
}

/** Greek letters in bold, if the alphabet is a bold one. */
function inBold(alphabet, letter) {
  const code = letter.codePointAt(0), [first, moved] = code < 0x3b1 ? [0x391, 0x1d71c] : [0x3b1, 0x1d736];
  const isBold = ["mathbf", "boldsymbol", "bm"].includes(alphabet) && code >= first && code < first + 25;
  return isBold ? String.fromCodePoint(moved + code - first) : letter;
}

/** Reads one formula. Throws where it meets what it does not know. */
class MathReader {
  constructor(source) {
    this.tokens = source.match(/\\(?:[A-Za-z]+\*?|[^])|\s+|\d+(?:\.\d+)?|[^]/gu) || [];
    this.at = 0;
    this.depth = 0;
    this.alphabet = null;
  }

  refuse() { throw new SyntaxError("not known"); }

  peek() {
    while (this.at < this.tokens.length && !this.tokens[this.at].trim()) this.at += 1;
    return this.tokens[this.at];
  }

  take(wanted) {
    const token = this.peek();
    if (token === undefined || (wanted && token !== wanted)) this.refuse();
    this.at += 1;
    return token;
  }

  takes(wanted) {
    const is = this.peek() === wanted;
    this.at += is;
    return is;
  }

  enter() {
    this.depth += 1;
    if (this.depth > MOST_NESTING) this.refuse();
  }

  /** Everything up to one of ``ends``, which stays. */
  until(...ends) {
    const nodes = [];
    this.enter();
    while (!ends.includes(this.peek())) {
      if (this.peek() === undefined) this.refuse();
      const style = { "\\displaystyle": "true", "\\textstyle": "false" }[this.peek()];
      if (style) {
        this.at += 1;
        nodes.push(mathElement("mstyle", { displaystyle: style }, ...this.until(...ends)));
      } else nodes.push(this.scripted());
    }
    this.depth -= 1;
    return nodes;
  }

  group() {
    this.take("{");
    const nodes = this.until("}");
    this.take("}");
    return row(nodes);
  }

  /** An argument: a group, a command with its arguments, or one character. */
  argument() {
    if (this.peek() === "{") return this.group();
    if (/^\d\d/.test(this.peek() || "")) { // of \frac12 each digit is one
      const token = this.take();
      this.tokens.splice(this.at, 0, token.slice(1));
      return mathElement("mn", {}, token[0]);
    }
    this.enter();
    const [node] = this.atom();
    this.depth -= 1;
    return node;
  }

  /** The source of a group, for text and names. */
  words() {
    this.take("{");
    let text = "", depth = 1;
    for (;;) {
      const token = this.tokens[this.at];
      if (token === undefined) this.refuse();
      this.at += 1;
      depth += (token === "{") - (token === "}");
      if (!depth) return text;
      if (/^\\[A-Za-z]|^\$/.test(token)) this.refuse();
      if (!/^[{}]$/.test(token)) text += /^\\[,:; ]$/.test(token) ? " " : token.replace(/^\\(?=.)/, "");
    }
  }

  /** An atom with its scripts and limits. */
  scripted() {
    const [base, limits] = this.atom();
    let below = null, above = null, isBeside = !limits;
    for (;;) {
      if (this.takes("\\limits")) isBeside = false;
      else if (this.takes("\\nolimits")) isBeside = true;
      else if (this.peek() === "_" && !below) [, below] = [this.take(), this.argument()];
      else if (this.peek() === "^" && !above) [, above] = [this.take(), this.argument()];
      else if (this.peek() === "'" && !above) {
        let primes = "";
        while (this.takes("'")) primes += "′";
        above = operator(primes);
        if (this.peek() === "^") above = (this.take(), row([above, this.argument()]));
      } else break;
    }
    if (!below && !above) return base;
    const [both, under, over] = isBeside ? ["msubsup", "msub", "msup"] : ["munderover", "munder", "mover"];
    if (below && above) return mathElement(both, {}, base, below, above);
    return below ? mathElement(under, {}, base, below) : mathElement(over, {}, base, above);
  }

  fence() {
    const token = this.take(), name = FENCES.has(token) ? token : token.replace(/^\\/, "");
    return FENCES.has(name) ? FENCES.get(name) : this.refuse();
  }

  fenced(text) {
    return text ? [operator(text, { stretchy: "true", fence: "true" })] : [];
  }

  /** The operator of a function's name. */
  named(name) {
    const isApplied = ["(", "\\left"].includes(this.peek());
    return operator(name, { form: "prefix", lspace: "0", rspace: isApplied ? "0" : "0.167em", movablelimits: "true" });
  }

  /** [node, whether its limits stand above and below it]. */
  atom() {
    const token = this.take();
    if (token === "{") {
      this.at -= 1;
      return [this.group(), false];
    }
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/^\d/.test(token)) {
      const digits = this.alphabet ? [...token].map((one) => inAlphabet(this.alphabet, one)).join("") : token;
      return [mathElement("mn", {}, digits), false];
    }
    if (token === "~") return [space(0.25), false];
    if (/^\p{L}$/u.test(token)) {
      const letter = this.alphabet ? inAlphabet(this.alphabet, token) : token;
      const upright = this.alphabet || !/[A-Za-z]/.test(token);
      return [mathElement("mi", upright ? { mathvariant: "normal" } : {}, letter), false];
    }
    if (/^[}_^&%#$\\]$/.test(token)) this.refuse();
    const text = { "-": "−", "*": "∗" }[token] || token;
    return [operator(text, /[()[\]|/]/.test(token) ? { stretchy: "false" } : {}), false];
  }

  command(name) {
    const beside = (node) => [node, false];
    if (LETTERS.has(name)) {
      const isUpright = /^[A-Z]/.test(name) && !this.alphabet;
      return beside(mathElement("mi", isUpright ? { mathvariant: "normal" } : {}, inBold(this.alphabet, LETTERS.get(name))));
    }
    if (OPERATORS.has(name)) return beside(operator(OPERATORS.get(name), { stretchy: "false" }));
    if (SUMS.has(name)) return [operator(SUMS.get(name), { largeop: "true", movablelimits: "true" }), true];
    if (INTEGRALS.has(name)) return beside(operator(INTEGRALS.get(name), { largeop: "true" }));
    if (LIMITS.has(name) || FUNCTIONS.has(name)) return [this.named(name), LIMITS.has(name)];
    if (SPACES.has(name)) return beside(space(SPACES.get(name)));
    if (/^[{}|]$/.test(name) || (name.length > 1 && FENCES.has(name))) {
      return beside(operator(FENCES.get(name === "|" ? "Vert" : name), { stretchy: "false" }));
    }
    if (Object.hasOwn(ALPHABETS, name)) {
      const outer = this.alphabet;
      this.alphabet = name;
      const node = this.argument();
      this.alphabet = outer;
      return beside(node);
    }
    if (TEXTS.has(name.replace("*", ""))) return this.text(name);
    if (ACCENTS.has(name) || UNDER.has(name)) {
      const mark = operator(ACCENTS.get(name) || UNDER.get(name), { stretchy: String(!/^(hat|bar|vec|d?dot|tilde)$/.test(name)) });
      const node = this.argument(), isBrace = name.endsWith("brace");
      return [UNDER.has(name) ? mathElement("munder", { accentunder: "true" }, node, mark)
        : mathElement("mover", { accent: "true" }, node, mark), isBrace];
    }
    if (SIZES.has(name)) {
      const size = { b: 1.2, B: 1.8 }[name[0]] + (/gg/.test(name) ? 0.9 : 0), text = this.fence();
      return beside(operator(text, { stretchy: "true", minsize: size + "em", maxsize: size + "em" }));
    }
    if (/^[dtc]?frac$/.test(name)) {
      return beside(this.styled(name, mathElement("mfrac", {}, this.argument(), this.argument())));
    }
    if (/^[dt]?binom$/.test(name)) {
      const inside = mathElement("mfrac", { linethickness: "0" }, this.argument(), this.argument());
      return beside(this.styled(name, row([operator("("), inside, operator(")")])));
    }
    if (name === "sqrt") {
      if (!this.takes("[")) return beside(mathElement("msqrt", {}, this.argument()));
      const degree = row(this.until("]"));
      this.take("]");
      return beside(mathElement("mroot", {}, this.argument(), degree));
    }
    if (name === "left") return beside(this.between());
    if (name === "begin") return beside(this.environment());
    if (["overset", "stackrel", "underset"].includes(name)) {
      const mark = this.argument(), base = this.argument();
      return beside(mathElement(name === "underset" ? "munder" : "mover", {}, base, mark));
    }
    if (/^x(right|left)arrow$/.test(name)) {
      const arrow = operator(name === "xrightarrow" ? "→" : "←", { stretchy: "true" });
      return beside(mathElement("mover", {}, arrow, row([space(0.5), this.argument(), space(0.5)])));
    }
    if (name === "boxed") return beside(mathElement("mrow", { class: "boxed" }, this.argument()));
    if (name === "substack") {
      this.take("{");
      return beside(this.rows("}", "center"));
    }
    if (name === "not") {
      const node = this.argument();
      if (node.localName !== "mo") this.refuse();
      node.append("\u0338");
      return beside(node);
    }
    if (name === "bmod") return beside(operator("mod", { lspace: "0.3em", rspace: "0.3em" }));
    if (name === "pmod") {
      const mod = mathElement("mi", {}, "mod");
      return beside(row([space(0.5), operator("("), mod, space(0.3), this.argument(), operator(")")]));
    }
    if (name === "tag") return beside(row([space(2), mathElement("mtext", {}, "(" + this.words() + ")")]));
    return this.refuse();
  }

  styled(name, node) {
    if (!/^[dt]/.test(name)) return node;
    return mathElement("mstyle", { displaystyle: String(name[0] === "d"), scriptlevel: "0" }, node);
  }

  text(name) {
    const words = this.words();
    if (/[_^&]/.test(words)) this.refuse();
    if (name.startsWith("operatorname")) return [this.named(words), name.endsWith("*")];
    if (/^math/.test(name)) return [mathElement("mi", { mathvariant: "normal" }, words.replace(/\s/g, "")), false];
    const kind = { textit: "italic", textbf: "bold", texttt: "mono" }[name];
    return [mathElement("mtext", kind ? { class: kind } : {}, words.replace(/\s+/g, "\u00a0")), false];
  }

  /** Everything from \left to \right. */
  between() {
    const nodes = this.fenced(this.fence());
    for (;;) {
      nodes.push(...this.until("\\middle", "\\right"));
      const isLast = this.take() === "\\right";
      nodes.push(...this.fenced(this.fence()));
      if (isLast) return mathElement("mrow", {}, ...nodes);
    }
  }

  environment() {
    const name = this.words();
    if (!Object.hasOwn(TABLES, name)) this.refuse();
    const [opening, closing, columns] = TABLES[name];
    const sides = { array: /^[lcr|\s]*$/, alignedat: /^\d+$/ }[name], given = sides ? this.words() : "";
    if (sides && !sides.test(given)) this.refuse();
    const letters = { l: "left", c: "center", r: "right" };
    const named = [...given.replace(/[^lcr]/g, "")].map((one) => letters[one]);
    const table = this.rows("\\end", named.length ? named : columns);
    if (this.words() !== name) this.refuse();
    return row([...this.fenced(opening), table, ...this.fenced(closing)]);
  }

  /** Cells up to ``end``, which is taken. columns: a side for all, the sides of each, or "pairs": right, left, right … */
  rows(end, columns) {
    const lines = [[]];
    for (;;) {
      while (this.takes("\\hline")) { /* drawn by no rule */ }
      const line = lines[lines.length - 1];
      if (this.peek() !== end || line.length) line.push(this.until("&", "\\\\", end));
      const token = this.take();
      if (token === end) break;
      if (token !== "\\\\") continue;
      lines.push([]);
      if (this.peek() !== "[") continue;
      const distance = /^\[-?[\d.]+ *[a-z]{2}\]/.exec(this.tokens.slice(this.at, this.at + 12).join(""));
      if (distance) while (this.take() !== "]");
    }
    const filled = lines.filter((line) => line.length), arePairs = columns === "pairs";
    const side = (place) => {
      if (arePairs) return ["right pair", "left pair"][place % 2];
      return (Array.isArray(columns) ? columns[place] : columns) || "center";
    };
    const cell = (nodes, place) => mathElement("mtd", { class: side(place) }, ...nodes);
    return mathElement("mtable", arePairs ? { displaystyle: "true" } : {}, ...filled.map((line) => mathElement("mtr", {}, ...line.map(cell))));
  }
}

/** A formula as an element, or null if it has something unknown in it. */
function formula(source, isDisplay) {
  if (source.length > MOST_MATH || !source.trim()) return null;
  const reader = new MathReader(source + "\n\\end");
  try {
    const isRows = /\\\\/.test(source) && !/\\begin|\\substack/.test(source);
    const nodes = isRows ? [reader.rows("\\end", "pairs")] : reader.until("\\end");
    if (!isRows) reader.take("\\end");
    if (reader.peek() !== undefined) return null;
    return mathElement("math", isDisplay ? { display: "block" } : {}, row(nodes));
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}
