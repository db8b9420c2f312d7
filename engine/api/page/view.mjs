// Messages as nodes. Whatever comes from the server or the user only becomes text (markdown.mjs says how).
import { Rendered } from './markdown.mjs';
import { figures, isWhole, shownArguments } from './stream.mjs';

export function el(tag, text, classes) {
  const made = document.createElement(tag);
  if (text !== undefined && text !== null) made.textContent = text;
  if (classes) made.className = classes;
  return made;
}

export function button(text, act, classes = 'plain') {
  const made = el('button', text, classes);
  made.type = 'button';
  made.addEventListener('click', act);
  return made;
}

/// The clipboard needs a secure context; a server on a local network has none.
async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = el('textarea', null, 'unseen'), before = document.activeElement;
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand('copy');
  area.remove();
  if (before) before.focus();
  if (!done) throw new Error('the browser does not let this page copy');
}

export function copyButton(text) {
  const made = button('Copy', async () => {
    try {
      await copy(text());
      made.textContent = 'Copied';
    } catch (e) {
      made.textContent = 'Cannot copy';
    }
    setTimeout(() => { made.textContent = 'Copy'; }, 1500);
  });
  return made;
}

function thumbnail(url, name) {
  const made = el('img');
  made.alt = name;
  made.src = /^data:image\/[a-z0-9.+-]+;base64,/i.test(url) ? url : 'data:,';
  return made;
}

export function thumbnails(urls, remove) {
  return urls.map((url, i) => {
    const item = el('li');
    item.append(thumbnail(url, `Image ${i + 1}`));
    if (remove) {
      const gone = button('✕', () => remove(i), '');
      gone.setAttribute('aria-label', `Remove image ${i + 1}`);
      item.append(gone);
    }
    return item;
  });
}

export function userMessage(message, edit) {
  const item = el('li', null, 'user'), bubble = el('div', null, 'bubble'), bar = el('div', null, 'bar');
  item.append(el('h3', 'You', 'unseen'));
  if (message.images && message.images.length) {
    const list = el('ul', null, 'images');
    list.append(...thumbnails(message.images));
    bubble.append(list);
  }
  if (message.text) bubble.append(el('p', message.text));
  if (edit) bar.append(button('Edit', edit));
  bar.append(copyButton(() => message.text));
  item.append(bubble, bar);
  return item;
}

/// An error in the server's words, and what can be done about it.
export function errorBox(text, actions) {
  const box = el('div', null, 'error'), bar = el('div', null, 'bar');
  box.setAttribute('role', 'alert');
  bar.append(...actions);
  box.append(el('p', text), bar);
  return box;
}

function span(ms) {
  return ms < 950 ? 'a moment' : ms < 60000 ? Math.round(ms / 1000) + ' s' : Math.floor(ms / 60000) + ' min ' + Math.round(ms % 60000 / 1000) + ' s';
}

/// One tool call: its name, its arguments as they grow, its result or a box for it.
class CallView {
  constructor() {
    this.node = el('div', null, 'call');
    this.title = el('h4');
    this.args = el('pre');
    this.args.tabIndex = 0;
    this.below = el('div');
    this.node.append(this.title, this.args, this.below);
  }
  update(call) {
    this.title.replaceChildren('Calls ', el('code', call.name || '…'));
    this.args.setAttribute('aria-label', 'Arguments of ' + call.name);
    const text = shownArguments(call);
    if (this.args.textContent !== text) this.args.textContent = text;
  }
  /// `result` is text or undefined; `asked` is whether one may be entered.
  finish(call, result, asked) {
    this.input = null;
    this.below.replaceChildren();
    if (result !== undefined) {
      const box = el('pre', result);
      box.tabIndex = 0;
      box.setAttribute('aria-label', 'Result of ' + call.name);
      this.below.append(el('h4', 'Result'), box);
    } else if (!isWhole(call)) {
      this.below.append(el('p', 'This call is not complete.', 'quiet'));
    } else if (asked) {
      const label = el('label', 'Result of ' + call.name);
      this.input = el('textarea', null, 'mono');
      this.input.rows = 2;
      label.append(this.input);
      this.below.append(label);
    }
  }
}

/// An answer, while it streams and after.
export class AnswerView {
  constructor(answer) {
    this.answer = answer;
    this.node = el('li', null, 'answer');
    this.fold = el('details', null, 'reasoning');
    this.summary = el('summary');
    const thought = el('div', null, 'thought'), text = el('div', null, 'text');
    this.fold.append(this.summary, thought);
    this.fold.hidden = true;
    this.calls = el('div', null, 'calls');
    this.after = el('div', null, 'after');
    this.note = el('p', null, 'note');
    this.bar = el('div', null, 'bar');
    this.figures = el('span', null, 'quiet figures');
    this.thought = new Rendered(thought, document);
    this.text = new Rendered(text, document, (head, code) => head.append(copyButton(() => code)));
    this.callViews = [];
    this.node.append(el('h3', 'Answer', 'unseen'), this.fold, text, this.calls, this.note, this.after, this.bar);
    this.summary.addEventListener('click', () => { this.touched = true; });
  }
  /// `busy`: more is to come.
  update(busy) {
    const { answer } = this, thinking = busy && !answer.content && !answer.calls.length;
    this.node.classList.toggle('busy', busy);
    this.node.setAttribute('aria-busy', String(busy));
    this.fold.hidden = !answer.reasoning;
    if (answer.reasoning) {
      this.thought.update(answer.reasoning);
      const label = thinking ? 'Thinking …' : answer.thoughtMs ? 'Thought for ' + span(answer.thoughtMs) : 'Thoughts';
      if (this.summary.textContent !== label) this.summary.textContent = label;
      if (!this.touched) this.fold.open = thinking;
    }
    this.text.update(answer.content.trim());
    answer.calls.forEach((call, i) => {
      if (!this.callViews[i]) {
        this.callViews[i] = new CallView();
        this.calls.append(this.callViews[i].node);
      }
      this.callViews[i].update(call);
    });
  }
  say(text) {
    this.note.textContent = text;
  }
  /// `results`: texts by call id. `act`: what may be done now: retry, results, edit; absent for old answers.
  finish(results, act) {
    const { answer } = this;
    this.update(false);
    this.after.replaceChildren();
    const cut = answer.finish === 'length' ? 'The limit of tokens ended this answer.' : '';
    this.say(answer.stopped ? 'You stopped this answer.' : cut);
    answer.calls.forEach((call, i) => this.callViews[i].finish(call, results[call.id], Boolean(act)));
    const asked = answer.calls.filter((call, i) => this.callViews[i].input);
    if (asked.length) {
      const read = () => act.results(answer.calls.flatMap((call, i) => (this.callViews[i].input ?
        [{role: 'tool', id: call.id, name: call.name, text: this.callViews[i].input.value}] : [])));
      for (const { input } of this.callViews) {
        if (!input) continue;
        input.addEventListener('keydown', e => {
          if (e.key !== 'Enter' || !(e.ctrlKey || e.metaKey)) return;
          e.preventDefault();
          read();
        });
      }
      this.after.append(button(asked.length === 1 ? 'Send the result' : 'Send the results', read, 'main'));
    }
    this.figures.textContent = figures(answer.usage, answer.firstMs, answer.lastMs);
    this.bar.replaceChildren();
    if (answer.content) this.bar.append(copyButton(() => answer.content.trim()));
    if (act && !answer.error) this.bar.append(button('Regenerate', act.retry));
    this.bar.append(this.figures);
    if (answer.error) {
      const actions = act ? [button('Try again', act.retry), button('Edit the message', act.edit)] : [];
      this.after.append(errorBox(answer.error, actions));
    }
  }
}
