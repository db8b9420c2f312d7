// Pictures of the page against kept ones, by the mean colour of small squares: fonts may differ a little, the layout may not.
import { inflateSync } from 'node:zlib';

const square = 16;

/// Width, height and bytes a pixel of a PNG with 8-bit channels, no palette, not interlaced; rows of bytes.
export function decode(png) {
  let at = 8, header, data = [];
  while (at < png.length) {
    const length = png.readUInt32BE(at), type = png.toString('latin1', at + 4, at + 8), body = png.subarray(at + 8, at + 8 + length);
    if (type === 'IHDR') header = body;
    if (type === 'IDAT') data.push(body);
    at += 12 + length;
  }
  const width = header.readUInt32BE(0), height = header.readUInt32BE(4), channels = { 2: 3, 6: 4 }[header[9]];
  if (header[8] !== 8 || !channels || header[12]) throw new Error('a PNG of a kind that this does not read');
  const raw = inflateSync(Buffer.concat(data)), line = width * channels, rows = [];
  for (let y = 0; y < height; y++) {
    const filter = raw[y * (line + 1)], row = Buffer.from(raw.subarray(y * (line + 1) + 1, (y + 1) * (line + 1)));
    const above = rows[y - 1] ?? Buffer.alloc(line);
    for (let x = 0; x < line; x++) {
      const left = x < channels ? 0 : row[x - channels], up = above[x], corner = x < channels ? 0 : above[x - channels];
      row[x] += [0, left, up, (left + up) >> 1, paeth(left, up, corner)][filter];
    }
    rows.push(row);
  }
  return { width, height, channels, rows };
}

function paeth(left, up, corner) {
  const guess = left + up - corner, a = Math.abs(guess - left), b = Math.abs(guess - up), c = Math.abs(guess - corner);
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

function means({ width, height, channels, rows }) {
  const out = [];
  for (let y = 0; y < height; y += square) {
    for (let x = 0; x < width; x += square) {
      for (let c = 0; c < 3; c++) {
        let sum = 0, n = 0;
        for (let j = y; j < Math.min(y + square, height); j++) {
          for (let i = x; i < Math.min(x + square, width); i++, n++) sum += rows[j][i * channels + c];
        }
        out.push(sum / n);
      }
    }
  }
  return out;
}

/// Share of the values that differ by more than 16 of 255; 1 for pictures of different sizes.
export function difference(one, other) {
  const a = decode(one), b = decode(other);
  if (a.width !== b.width || a.height !== b.height) return 1;
  const x = means(a), y = means(b);
  return x.filter((value, i) => Math.abs(value - y[i]) > 16).length / x.length;
}
