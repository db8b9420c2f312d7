// A small part of Markdown (paragraphs, headings, lists, code, bold) as plain objects, and those as nodes. Whatever else a model
// writes, HTML and links included, stays the text that it is: only the tags below are ever made, and text only becomes text nodes.

const depthLimit = 8;  // of lists; deeper ones are text
const fence = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const heading = /^ {0,3}(#{1,6}) +(.*)$/;
const item = /^( {0,12})([-*+]|\d{1,9}[.)]) +(.*)$/;

/// [{text}] or {code} or {bold: spans}.
export function spans(text, bold = true) {
  const out = [], missing = new Set();  // fences that do not come again: nothing is looked for twice
  let plain = '', i = 0;
  const flush = () => {
    if (plain) out.push({text: plain});
    plain = '';
  };
  while (i < text.length) {
    let run = 0;
    while (text[i + run] === '`') run++;
    if (run) {
      const end = missing.has(run) ? -1 : closing(text, i + run, run);
      if (end < 0) {
        missing.add(run);
        plain += text.slice(i, i + run);
        i += run;
      } else {
        flush();
        const code = text.slice(i + run, end);
        out.push({code: code.startsWith(' ') && code.endsWith(' ') && code.trim() ? code.slice(1, -1) : code});
        i = end + run;
      }
      continue;
    }
    if (bold && text.startsWith('**', i) && /\S/.test(text[i + 2] || '') && !missing.has('**')) {
      const end = text.indexOf('**', i + 3);
      if (end < 0) {
        missing.add('**');
      } else {
        flush();
        out.push({bold: spans(text.slice(i + 2, end), false)});
        i = end + 2;
        continue;
      }
    }
    plain += text[i++];
  }
  flush();
  return out;
}

/// Where a run of exactly `run` backticks begins, from `at` on; -1: nowhere.
function closing(text, at, run) {
  for (let i = text.indexOf('`', at); i >= 0; i = text.indexOf('`', i)) {
    let n = 0;
    while (text[i + n] === '`') n++;
    if (n === run) return i;
    i += n;
  }
  return -1;
}

/// {p: spans}, {heading: spans}, {code, language}, {list: [blocks], ordered, start}.
export function parse(text) {
  return parseLines(text.split(/\r\n|\r|\n/), 0);
}

function parseLines(lines, depth) {
  const blocks = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) blocks.push({p: spans(paragraph.join('\n'))});
    paragraph = [];
  };
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    let found;
    if ((found = fence.exec(line))) {
      flush();
      const end = codeEnd(lines, i + 1, found[1]);
      blocks.push({code: lines.slice(i + 1, end).join('\n'), language: found[2].trim().split(/\s/)[0]});
      i = end + 1;
    } else if ((found = heading.exec(line))) {
      flush();
      blocks.push({heading: spans(found[2].replace(/ #+ *$/, ''))});
      i++;
    } else if (depth < depthLimit && item.test(line)) {
      flush();
      i = parseList(lines, i, depth, blocks);
    } else {
      if (line.trim() === '') flush();
      else paragraph.push(line);
      i++;
    }
  }
  flush();
  return blocks;
}

/// An open block ends with the text: more of it may be on its way.
function codeEnd(lines, from, opened) {
  for (let i = from; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.length >= opened.length && line === opened[0].repeat(line.length)) return i;
  }
  return lines.length;
}

function parseList(lines, from, depth, blocks) {
  const [, indent, marker] = item.exec(lines[from]);
  const ordered = /\d/.test(marker);
  const list = {list: [], ordered, start: ordered ? parseInt(marker, 10) : 1};
  let i = from;
  while (i < lines.length) {
    const found = item.exec(lines[i]);
    if (!found || found[1].length < indent.length || /\d/.test(found[2]) !== ordered) break;
    const inner = [found[3]], column = lines[i].length - found[3].length;
    for (i++; i < lines.length; i++) {
      const blank = lines[i].trim() === '';
      const next = blank ? lines[i + 1] || '' : lines[i];
      const deeper = next.length - next.trimStart().length > indent.length && next.trim() !== '';
      if (!deeper && (blank || item.test(next) || heading.test(next) || fence.test(next))) break;
      inner.push(blank ? '' : dedent(lines[i], column));
    }
    list.list.push(parseLines(inner, depth + 1));
    if (i < lines.length && lines[i].trim() === '' && item.test(lines[i + 1] || '')) i++;  // a blank line between items
  }
  blocks.push(list);
  return i;
}

function dedent(line, column) {
  return line.slice(Math.min(line.length - line.trimStart().length, column));
}

function nodesOf(list, doc) {
  return list.map(span => {
    if (span.text !== undefined) return doc.createTextNode(span.text);
    const made = doc.createElement(span.code !== undefined ? 'code' : 'strong');
    if (span.code !== undefined) made.textContent = span.code;
    else made.append(...nodesOf(span.bold, doc));
    return made;
  });
}

/// One block as a node. `extra(node, text)` may add to a block of code (a copy button).
export function nodeOf(block, doc, extra) {
  if (block.p || block.heading) {
    const made = doc.createElement('p');
    if (block.heading) made.className = 'heading';
    made.append(...nodesOf(block.p || block.heading, doc));
    return made;
  }
  if (block.code !== undefined) {
    const made = doc.createElement('div'), head = doc.createElement('div'), pre = doc.createElement('pre');
    made.className = 'code';
    head.className = 'code-head';
    head.append(doc.createTextNode(block.language || 'text'));
    pre.tabIndex = 0;
    pre.textContent = block.code;
    made.append(head, pre);
    if (extra) extra(head, block.code);
    return made;
  }
  const made = doc.createElement(block.ordered ? 'ol' : 'ul');
  if (block.ordered) made.start = block.start;
  for (const blocks of block.list) {
    const li = doc.createElement('li');
    li.append(...blocks.map(inner => nodeOf(inner, doc, extra)));
    made.append(li);
  }
  return made;
}

/// A growing text in a node: blocks that stay as they were keep their nodes.
export class Rendered {
  constructor(parent, doc, extra) {
    Object.assign(this, {parent, doc, extra, keys: []});
  }
  update(text) {
    const blocks = parse(text), keys = blocks.map(block => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.keys[same]) same++;
    while (this.parent.childNodes.length > same) this.parent.lastChild.remove();
    this.parent.append(...blocks.slice(same).map(block => nodeOf(block, this.doc, this.extra)));
    this.keys = keys;
  }
}
