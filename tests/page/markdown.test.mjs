import assert from 'node:assert/strict';
import test from 'node:test';
import { Rendered, nodeOf, parse, spans } from '../../engine/api/page/markdown.mjs';
import { FakeDocument } from './document.mjs';

const allowed = new Set(['p', 'ul', 'ol', 'li', 'strong', 'code', 'pre', 'div']);
function html(text) {
  const doc = new FakeDocument();
  const out = parse(text).map((block) => String(nodeOf(block, doc))).join('');
  for (const tag of doc.made) assert.ok(allowed.has(tag), tag);
  return out;
}
const code = (language, text) => `<div class="code"><div class="code-head">${language}</div><pre>${text}</pre></div>`;

test('paragraphs, headings and bold', () => {
  assert.equal(html('one\ntwo\n\nthree **four** five'), '<p>one\ntwo</p><p>three <strong>four</strong> five</p>');
  assert.equal(html('## Title ##\ntext'), '<p class="heading">Title</p><p>text</p>');
  assert.equal(html('a ** b ** c, 2**3'), '<p>a ** b ** c, 2**3</p>');
  assert.equal(html('#hash and 1.5'), '<p>#hash and 1.5</p>');
  assert.equal(html(''), '');
});

test('inline code', () => {
  assert.deepEqual(spans('a `b` c'), [{ text: 'a ' }, { code: 'b' }, { text: ' c' }]);
  assert.deepEqual(spans('`` a`b ``'), [{ code: 'a`b' }]);
  assert.deepEqual(spans('open ` here'), [{ text: 'open ` here' }]);
  assert.deepEqual(spans('`**x**`'), [{ code: '**x**' }]);
  assert.deepEqual(spans('**a `b`**'), [{ bold: [{ text: 'a ' }, { code: 'b' }] }]);
});

test('blocks of code, closed and still open', () => {
  assert.equal(html('```python\nif a < b:\n  pass\n```\nafter'), code('python', 'if a &lt; b:\n  pass') + '<p>after</p>');
  assert.equal(html('```\nopen'), code('text', 'open'));
  assert.equal(html('````\n```\n````'), code('text', '```'));
  assert.equal(html('~~~ js extra\n```\n~~~'), code('js', '```'));
});

test('lists', () => {
  assert.equal(html('- a\n- b **c**'), '<ul><li><p>a</p></li><li><p>b <strong>c</strong></p></li></ul>');
  assert.equal(html('3. a\n\n4. b'), '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>');
  assert.equal(html('- a\n  - b\n    - c\n- d'),
    '<ul><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li><li><p>d</p></li></ul>');
  assert.equal(html('1. a\n   ```\n   x\n   ```\n2. b'), `<ol><li><p>a</p>${code('text', 'x')}</li><li><p>b</p></li></ol>`);
  assert.equal(html('- a\n\nb'), '<ul><li><p>a</p></li></ul><p>b</p>');
  assert.equal(html('text\n- a\n1. b'), '<p>text</p><ul><li><p>a</p></li></ul><ol><li><p>b</p></li></ol>');
});

test('hostile text stays text', () => {
  for (const text of [
    '<script>alert(1)</script>', '<img src=x onerror=alert(1)>', '[a](javascript:alert(1))', '![a](http://evil.example/x.png)',
    '**<b onclick="x()">**', '- <iframe src="//evil.example">', '`<svg/onload=alert(1)>`', '```<script>\n</pre><script>x()</script>\n```',
    '# <style>*{display:none}</style>', '&lt;script&gt;', '\u202e<script>', '<!-- -->', '```"><img src=x>\nx\n```',
  ]) {
    const out = html(text);
    assert.doesNotMatch(out, /<(?!\/?(p|ul|ol|li|strong|code|pre|div)[ >])/, text);
    assert.doesNotMatch(out, /<[^>]*(href|src|style|on\w+)=/, text);
  }
  assert.equal(html('<script>alert(1)</script>'), '<p>&lt;script>alert(1)&lt;/script></p>');
});

test('text that is made to be slow or deep is neither lost nor in the way', () => {
  const n = 20000;
  for (const text of ['`'.repeat(n), '**'.repeat(n), '` '.repeat(n), '- '.repeat(n), '#'.repeat(n), ' '.repeat(n), '```\n'.repeat(n),
    '1. a\n'.repeat(n), '**a '.repeat(n), Array.from({ length: 200 }, (_, i) => '`'.repeat(i + 1)).join(' '),
    '`' + ' a'.repeat(n) + ' b`', Array.from({ length: 400 }, (_, i) => ' '.repeat(i % 13) + '- x').join('\n'),
    Array.from({ length: 300 }, (_, i) => ' '.repeat(i * 2) + '- x').join('\n')]) {
    html(text);
  }
  const deep = parse(Array.from({ length: 30 }, (_, i) => '- '.repeat(i + 1) + 'x').join('\n'));
  assert.ok(JSON.stringify(deep).includes('- x'));
});

test('a growing text has the same nodes in the end, and keeps what is done', () => {
  const text = 'First **bold**\n\n- a\n- b `c`\n\n```js\nlet x = 1;\n```\n\nLast.';
  const parent = new FakeDocument().createElement('div');
  const rendered = new Rendered(parent, new FakeDocument());
  let first;
  for (let i = 1; i <= text.length; i++) {
    rendered.update(text.slice(0, i));
    if (i === 20) first = parent.childNodes[0];
  }
  assert.equal(parent.childNodes[0], first);
  assert.equal(parent.childNodes.join(''), html(text));
});
